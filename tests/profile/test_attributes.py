"""What modules keep in attributes: what goes back after a step, and what stays with what the step has set up."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from recollect._profile.attributes import Attributes


class Part(nn.Module):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)


def find_left(model: nn.Module, *changes: dict[str, Any], is_hooked: bool = False, is_written: bool = False) -> Any:
    """The attributes of a module after each run of a step has changed some."""
    attributes = Attributes()
    for part in model.modules():
        attributes.note(part)
    for change in changes:
        for name, value in change.items():
            setattr(model, name, value)
        if is_hooked:
            nn.Module.register_forward_hook(next(iter(model.children()), model), lambda *_: None)
        attributes.settle(lambda _: is_written)
        attributes.restore()
    return {name: value for name, value in vars(model).items() if any(name in change for change in changes)}


def test_numbers_flags_and_texts_go_back() -> None:
    before = {"step": 1, "share": 0.5, "is_on": False, "state": "new", "size": (1, 2), "best": None}
    after = {"step": 2, "share": 0.6, "is_on": True, "state": "old", "size": (3, 4), "best": 1.5}
    assert find_left(Part(**before), after, after) == before


def test_small_tensors_go_back_unless_the_step_made_the_first() -> None:
    state = torch.zeros(2)
    left = find_left(Part(state=state, table=None), {"state": torch.ones(2), "table": torch.ones(2)})
    assert left["state"] is state
    assert left["table"] is not None


def test_what_takes_the_place_of_none_goes_if_each_step_makes_another_or_if_it_has_a_graph() -> None:
    table = torch.ones(2)
    runs = [{"table": table, "state": torch.ones(2), "pair": (torch.ones(2), None)} for _ in range(2)]
    left = find_left(Part(table=None, state=None, pair=None), *runs)
    assert left == {"table": table, "state": None, "pair": None}
    hidden = torch.ones(2, requires_grad=True) * 2
    assert find_left(Part(state=None), {"state": (hidden, hidden.detach())}) == {"state": None}


def test_collections_hold_what_they_held_and_dicts_what_they_have_got() -> None:
    model = Part(log=[1.0], seen={1}, recent=deque([1], maxlen=2), flags={"is_on": False}, gone=[3])
    attributes, held = Attributes(), vars(model)
    log = held["log"]
    attributes.note(model)
    for _ in range(2):
        held["log"].append(2.0)
        held["seen"].add(2)
        held["recent"].extend((2, 3))
        held["flags"].update(is_on=True, table=torch.ones(2))
        held["gone"] = []
        attributes.settle(lambda _: False)
        attributes.restore()
    assert held["log"] is log
    assert (held["log"], held["seen"], held["recent"], held["gone"]) == ([1.0], {1}, deque([1]), [3])
    assert list(held["flags"]) == ["is_on", "table"]
    assert held["flags"]["is_on"] is False


def test_attributes_that_were_not_there_stay() -> None:
    assert find_left(Part(), {"is_built": True}) == {"is_built": True}


def test_flags_stay_where_hooks_or_parts_were_set_up_and_numbers_do_not() -> None:
    after = {"is_on": True, "step": 1}
    assert find_left(Part(is_on=False, step=0), after, is_hooked=True) == {"is_on": True, "step": 0}
    assert find_left(Part(is_on=False, inner=nn.Tanh()), {"is_on": True}, is_hooked=True) == {"is_on": True}
    assert find_left(Part(is_on=False, inner=nn.Tanh()), {"is_on": True, "inner": nn.ReLU()})["is_on"]


def test_flags_of_a_module_that_wrote_into_its_parameters_go_back() -> None:
    assert find_left(Part(is_on=False), {"is_on": True}, is_hooked=True, is_written=True) == {"is_on": False}


def test_numbers_stay_beside_a_large_table_that_was_built_anew() -> None:
    """Held until the end, the old one would count in the step that lets go of it."""
    table = torch.zeros(2**20)
    left = find_left(Part(table=table, length=1), {"table": torch.zeros(2**20), "length": 2}, {})
    assert left["table"] is not table
    assert left["length"] == 2
    assert find_left(Part(table=table, length=1), {"length": 2}) == {"length": 1}


def test_tensors_with_a_graph_are_not_held() -> None:
    graph = torch.ones(2, requires_grad=True) * 2
    left: dict[str, Tensor] = find_left(Part(loss=graph), {"loss": graph * 2})
    assert left["loss"] is not graph


def test_modules_of_torch_keep_their_own_flags() -> None:
    """Those of DDP tell what its reducer has done, which stays."""
    model = nn.Linear(1, 1)
    model.is_ready = False  # type: ignore[assignment, unused-ignore]
    assert find_left(model, {"is_ready": True}) == {"is_ready": True}
