"""Functions that reach each other by global names are found once, and again when the names lead elsewhere."""

import gc
import weakref
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.function_groups import find_group
from recollect._core.reachable import find_held
from tests.watching import backward

PROGRAM = """
import torch
layer = torch.nn.Linear(4, 4)
other = torch.nn.Linear(4, 4)
gain = 2.0
def inner(x): return layer(x).tanh() * gain
def middle(x): return inner(x).tanh()
def outer(x): return middle(x) + inner(x)
def wider(x): return layer(x).tanh() * other(x)
"""


def make_program() -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PROGRAM, names)
    return names


def test_a_group_has_all_functions_and_what_they_name() -> None:
    names = make_program()
    found = find_group(names["outer"])
    assert found is not None
    functions, named = found
    assert {function.__name__ for function in functions} == {"outer", "middle", "inner"}
    [(table, others)] = named
    assert table is names
    assert set(others) == {"layer", "gain"}


def test_a_function_that_is_made_anew_or_alone_has_none() -> None:
    names = make_program()
    assert find_group(names["inner"]) is None
    anew = FunctionType(names["outer"].__code__, names, "outer")
    assert find_group(anew) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda names: names.update(inner=names["wider"]),
        lambda names: names.update(layer=names["other"]),
        lambda names: names.update(middle=nn.Linear(4, 4)),
        lambda names: names.update(middle=torch.tanh),
    ],
    ids=["another function", "another layer", "a layer for a function", "a builtin for a function"],
)
def test_names_that_lead_elsewhere_are_followed(change: Any) -> None:
    def run(names: dict[str, Any], wrap: Any) -> list[Tensor | None]:
        x, found = torch.ones(2, 4, requires_grad=True), list[Tensor | None]()
        for step in range(4):
            if step == 2:
                change(names)
            loss = wrap(names["outer"])(x).sum()
            names["gain"] += 1.0  # between forward and backward
            backward(loss)
            found.append(x.grad.clone() if x.grad is not None else None)
        return found + [p.grad for name in ("layer", "other") for p in names[name].parameters()]

    plain, ours = run(make_program(), lambda fn: fn), run(make_program(), recollect.checkpoint)
    for one, other in zip(plain, ours, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))


def test_a_name_that_was_a_builtins_may_come_to_lead_to_a_layer() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def inner(x): return abs(x)\ndef outer(x): return inner(x)", names)
    assert find_held(names["outer"]).modules == []
    assert find_group(names["outer"]) is not None
    names["abs"] = nn.Linear(4, 4)
    assert find_held(names["outer"]).modules == [names["abs"]]


def test_groups_keep_nothing_alive() -> None:
    names = make_program()
    assert find_group(names["outer"]) is not None
    layer, function = weakref.ref(names["layer"]), weakref.ref(names["outer"])
    names.clear()
    gc.collect()  # functions and their globals hold each other
    assert layer() is None
    assert function() is None
