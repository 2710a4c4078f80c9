"""A composable API is applied to a module once, has a state there, and changes no name."""

import copy
import gc
import pickle
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from recollect.compat.composable import contract, get_registry


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.ReLU())


def test_each_api_has_a_state_of_its_own_on_each_module() -> None:
    @contract()
    def one(module: nn.Module, value: int) -> nn.Module:
        one.state(module).value = value  # type: ignore[attr-defined]
        return module

    @contract()
    def other(module: nn.Module) -> None:
        other.state(module).value = "other"  # type: ignore[attr-defined]

    model: Any = make_model()
    assert one(model, 1) is model
    assert one(model[0], value=2) is model[0]
    assert other(model) is model
    assert (one.state(model).value, one.state(model[0]).value, other.state(model).value) == (1, 2, "other")  # type: ignore[attr-defined]
    assert one.state(model[1]) is other.state(model[0]) is None


def test_the_state_is_of_the_class_that_was_asked_for() -> None:
    class Bag:
        count = 0

    @contract(Bag)
    def api(module: nn.Module) -> nn.Module:
        api.state(module).count += 1
        return module

    model = api(make_model())
    assert type(api.state(model)) is Bag
    assert api.state(model).count == 1


def test_the_decorated_function_keeps_its_name_and_text() -> None:
    @contract()
    def api(module: nn.Module) -> nn.Module:
        """Does nothing."""
        return module

    assert (api.__name__, api.__doc__) == ("api", "Does nothing.")


def test_the_registry_lists_apis_in_the_order_of_application() -> None:
    @contract()
    def first(module: nn.Module) -> nn.Module:
        return module

    @contract()
    def another(module: nn.Module) -> nn.Module:
        return module

    model = make_model()
    assert get_registry(model) is None
    first(model)
    registry = get_registry(model)
    assert registry is not None
    assert list(registry) == ["first"]
    another(model)
    assert list(registry) == ["first", "another"]
    assert get_registry(model[0]) is None


def test_an_api_is_applied_once() -> None:
    @contract()
    def api(module: nn.Module) -> nn.Module:
        return module

    model = api(make_model())
    state = api.state(model)
    with pytest.raises(AssertionError, match=r"api has already been applied to this module, and can be applied only"):
        api(model)
    assert api.state(model) is state
    api(model[0])


def test_two_apis_of_one_name_are_refused() -> None:
    def make(count: int) -> Any:
        def api(module: nn.Module) -> nn.Module:
            return module

        api.__qualname__ = f"api{count}"
        return contract()(api)

    one, other, model = make(1), make(2), make_model()
    one(model)
    with pytest.raises(
        AssertionError, match=r"(?s)api has already been applied.* another function of that name.*Rename"
    ):
        other(model)
    assert other.state(model) is None


def test_an_api_that_raises_was_not_applied() -> None:
    @contract()
    def api(module: nn.Module, fails: bool = False) -> nn.Module:
        if fails:
            raise ValueError("no")
        return module

    model = make_model()
    before = dict(vars(model))
    with pytest.raises(ValueError, match="no"):
        api(model, fails=True)
    assert vars(model) == before
    assert api.state(model) is None
    assert api(model) is model


def test_modules_given_together_share_one_state() -> None:
    @contract()
    def api(modules: Sequence[nn.Module]) -> Sequence[nn.Module]:
        return modules

    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    api([model[0], model[1]])
    api((model[2], model[3]))
    api([model[4]])
    states = [api.state(module) for module in model]
    assert states[0] is states[1]
    assert states[2] is states[3]
    assert len({id(state) for state in states}) == 3
    assert all(list(get_registry(module) or ()) == ["api"] for module in model)
    with pytest.raises(AssertionError, match="api has already been applied"):
        api([nn.Linear(1, 1), model[1]])


def test_the_state_of_several_modules_lies_on_those_inside_no_other() -> None:
    @contract()
    def api(modules: list[nn.Module]) -> None:
        pass

    model: Any = make_model()
    api([model[1][0], model[1], model[0], model[1][1]])
    assert api.state(model[1]) is api.state(model[0]) is not None
    assert api.state(model[1][0]) is api.state(model[1][1]) is None
    assert get_registry(model[1][0]) is None


def test_hooks_may_be_added() -> None:
    @contract()
    def api(module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda _module, _args, result: result + 1)
        return module

    model, x = make_model().eval(), torch.randn(2, 3)
    expected = model(x) + 1
    assert torch.equal(api(model)(x), expected)


def test_names_may_not_change() -> None:
    class Around(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    @contract()
    def wrap(module: nn.Module) -> nn.Module:
        return Around(module)

    @contract()
    def add_buffer(module: nn.Module) -> None:
        module.register_buffer("extra", torch.ones(1))

    @contract()
    def reorder(module: nn.Module) -> None:
        module._parameters["weight"] = module._parameters.pop("weight")

    @contract()
    def add_module(module: nn.Module) -> None:
        module.add_module("extra", nn.ReLU())

    with pytest.raises(RuntimeError, match=r"(?s)wrap changed the names of parameters of Linear: gone: \['weight', "):
        wrap(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="cannot modify FQNs"):
        wrap(nn.ReLU())
    with pytest.raises(RuntimeError, match=r"names of buffers of Linear: gone: \[\]; new: \['extra'\]"):
        add_buffer(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"parameters of Linear: the order was \['weight', 'bias'\] and is \['bias'"):
        reorder(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="names of modules of Linear"):
        add_module(nn.Linear(2, 2))


def test_other_modules_with_the_same_names_may_be_returned() -> None:
    @contract()
    def replace(module: nn.Module) -> nn.Module:
        return nn.Linear(2, 2)

    module = nn.Linear(2, 2)
    assert replace(module) is not module
    assert replace.state(module) is not None


def test_as_many_modules_must_come_back() -> None:
    @contract()
    def lose(modules: list[nn.Module]) -> list[nn.Module]:
        return modules[1:]

    with pytest.raises(AssertionError, match="lose was given 2 modules and returned 1"):
        lose([nn.ReLU(), nn.ReLU()])


@pytest.mark.parametrize("given", [3, None, ["a"], torch.ones(1)], ids=str)
def test_only_modules_are_taken(given: Any) -> None:
    @contract()
    def api(module: nn.Module) -> nn.Module:
        return module

    with pytest.raises(TypeError, match="api expects a module or a sequence of modules, not"):
        api(given)


@pytest.mark.parametrize("name", ["states", "registry"])
def test_a_module_whose_state_was_overwritten_is_refused(name: str) -> None:
    @contract()
    def api(module: nn.Module) -> nn.Module:
        return module

    model = make_model()
    vars(model)[f"_recollect_composable_{name}"] = "mine"
    with pytest.raises(AssertionError, match=r"should hold the registry of composable APIs, and holds 'mine'"):
        api(model)


@contract()
def remember(module: nn.Module, value: list[int]) -> None:
    remember.state(module).value = value  # type: ignore[attr-defined]


def test_states_are_copied_and_pickled_with_the_module() -> None:
    model = make_model()
    remember(model, [1])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        remember.state(other).value.append(2)  # type: ignore[attr-defined]
        assert list(get_registry(other) or ()) == ["remember"]
        with pytest.raises(AssertionError, match="remember has already been applied"):
            remember(other, [3])
    assert remember.state(model).value == [1]  # type: ignore[attr-defined]


def test_nothing_is_stored_in_a_state_dict_and_nothing_keeps_the_module() -> None:
    model = make_model()
    remember(model, [1])
    assert list(model.state_dict()) == list(make_model().state_dict())
    gc.disable()
    try:
        alive = ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()
