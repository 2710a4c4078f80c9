"""Wrappers call the module through the engine, and leave no trace in what is stored or named."""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)

from recollect.compat import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint,
    checkpoint_wrapper,
    offload_wrapper,
)
from tests.watching import Operators, backward

Wrap = Callable[[nn.Module], nn.Module]

REENTRANT: Wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
WRAPS = {"checkpoint": checkpoint_wrapper, "reentrant": REENTRANT, "offload": offload_wrapper}
each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())


def make_block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GELU(), nn.Linear(4, 4))


class Keywords(nn.Module):
    """Takes some of its arguments by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor, *, scale: Tensor, **more: Any) -> tuple[Tensor, Any]:
        return (self.linear(a) * scale).tanh(), more


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    gradients = [parameter.grad for parameter in model.parameters()]
    return [x.grad, *(gradient for gradient in gradients if gradient is not None)]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 1
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@each_wrap
def test_gradients_are_those_of_the_plain_module(wrap: Wrap) -> None:
    plain, x = make_block(), torch.randn(3, 4)
    wrapped = wrap(copy.deepcopy(plain))
    assert_same(step(wrapped, x), step(plain, x))
    assert all(torch.equal(one, other) for one, other in zip(wrapped.buffers(), plain.buffers(), strict=True))


@each_wrap
def test_classes_are_told_apart(wrap: Wrap) -> None:
    wrapped = wrap(nn.Linear(2, 2))
    assert isinstance(wrapped, ActivationWrapper)
    assert isinstance(wrapped, OffloadWrapper if wrap is offload_wrapper else CheckpointWrapper)


@each_wrap
def test_keyword_arguments_reach_the_module(wrap: Wrap) -> None:
    module = Keywords()
    a, scale = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    plain, _ = module(a, scale=scale)
    expected = torch.autograd.grad(plain.sum(), [a, scale, module.linear.weight])
    value, more = wrap(module)(a, scale=scale, extra=3)
    assert more == {"extra": 3}
    value.sum().backward()
    assert_same([a.grad, scale.grad, module.linear.weight.grad], list(expected))  # type: ignore[list-item]


def test_keyword_arguments_alone_reach_a_reentrant_module() -> None:
    a = torch.randn(3, 4, requires_grad=True)
    value, _ = REENTRANT(Keywords())(a=a, scale=torch.ones(4))
    value.sum().backward()
    assert a.grad is not None


def test_arguments_named_like_options_reach_the_module() -> None:
    seen = []

    class Debuggable(nn.Linear):
        def forward(self, x: Tensor, debug: str = "", early_stop: int = 0) -> Tensor:
            seen.append((debug, early_stop))
            return super().forward(x).exp()

    checkpoint_wrapper(Debuggable(2, 2), early_stop=False)(torch.ones(1, 2), debug="a", early_stop=7).sum().backward()
    assert seen == [("a", 7)] * 2


@each_wrap
def test_checkpointed_modules_run_again_and_offloaded_ones_do_not(wrap: Wrap) -> None:
    seen = Operators()
    loss = wrap(make_block())(torch.randn(8, 4, requires_grad=True)).sum()
    with seen:
        backward(loss)
    assert ("gelu" in seen.again) == (wrap is not offload_wrapper)


def test_options_reach_the_engine() -> None:
    entered = []

    @contextlib.contextmanager
    def note(side: str) -> Iterator[None]:
        entered.append(side)
        yield

    def contexts() -> tuple[Any, Any]:
        return note("forward"), note("again")

    checkpoint_wrapper(nn.Linear(1, 1), context_fn=contexts)(torch.ones(2, 1)).sum().backward()
    assert entered == ["forward", "again"]


def test_options_reach_a_given_function_and_the_engine_is_its_own() -> None:
    calls = []

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(options)
        return checkpoint(function, *args, **options)

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    wrapped = checkpoint_wrapper(nn.Linear(1, 1), checkpoint_fn=run, **options)
    wrapped(torch.ones(2, 1)).sum().backward()
    assert calls == [options]


def test_offloaded_values_are_safe_from_later_changes_in_place() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            middle = x * 2
            return middle, middle * middle

    x = torch.ones(2, requires_grad=True)
    middle, result = offload_wrapper(Square())(x)
    middle.add_(1)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 8.0))  # type: ignore[arg-type]


class Net(nn.Module):
    """Wrappers as child, inside each other, around a container, and none."""

    def __init__(self, wrap: Wrap = lambda module: module) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(4, 4))
        self.middle = wrap(nn.Sequential(wrap(make_block()), nn.Linear(4, 4)))
        self.twice = wrap(wrap(nn.BatchNorm1d(4)))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.twice(self.middle(self.first(x))))
        return result


@each_wrap
def test_complaint_36_state_dict_keys_have_no_prefix(wrap: Wrap) -> None:
    plain, wrapped = Net(), Net(wrap)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert list(wrap(wrapped).state_dict()) == list(plain.state_dict())


@each_wrap
def test_complaint_36_parameters_and_buffers_are_named_as_in_the_state_dict(wrap: Wrap) -> None:
    plain, wrapped = Net(), Net(wrap)
    for model in (wrapped, wrap(copy.deepcopy(wrapped)), wrapped.middle, wrapped.twice):
        named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        assert sorted(named) == sorted(model.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    outer = nn.ModuleDict({"net": wrapped, "again": wrapped.middle})
    plain_outer = nn.ModuleDict({"net": plain, "again": plain.middle})
    choices: list[dict[str, Any]] = [{}, {"remove_duplicate": False}, {"prefix": "p"}, {"recurse": False}]
    for options in choices:
        ours, theirs = ([name for name, _ in model.named_parameters(**options)] for model in (outer, plain_outer))
        assert ours == theirs


@each_wrap
def test_complaint_36_state_dicts_load_both_ways(wrap: Wrap) -> None:
    plain, wrapped = Net(), Net(wrap)
    for source, target in ((plain, wrapped), (wrapped, plain), (wrap(wrapped), plain), (plain, wrap(Net(wrap)))):
        for tensor in source.state_dict().values():
            tensor.add_(1)
        assert target.load_state_dict(source.state_dict(), strict=True) == ([], [])
        assert_same(list(target.state_dict().values()), list(source.state_dict().values()))


def test_complaint_36_distributed_checkpoints_have_plain_names() -> None:
    plain, wrapped = Net(), Net(checkpoint_wrapper)
    state = get_model_state_dict(wrapped)
    assert list(state) == list(plain.state_dict())
    for target in (plain, wrapped):
        assert set_model_state_dict(target, get_model_state_dict(wrapped)) == ([], [])
    assert_same(list(plain.state_dict().values()), list(wrapped.state_dict().values()))
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9) for model in (plain, wrapped)]
    ours, theirs = (
        get_optimizer_state_dict(model, opt) for model, opt in zip((wrapped, plain), reversed(optimizers), strict=True)
    )
    assert ours["param_groups"] == theirs["param_groups"]


def test_a_state_dict_with_the_prefix_loads_too() -> None:
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    state = {f"_checkpoint_wrapped_module.{name}": value + 1 for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(state)
    assert torch.equal(wrapped.weight, state["_checkpoint_wrapped_module.weight"])  # type: ignore[arg-type]


def test_what_a_state_dict_lacks_is_reported_without_the_prefix() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    report = model.load_state_dict({"0.weight": torch.ones(2, 2), "0.other": torch.ones(1)}, strict=False)
    assert report == (["0.bias"], ["0.other"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias"'):
        model.load_state_dict({"0.weight": torch.ones(2, 2)})


def test_versions_of_modules_are_stored_under_plain_names() -> None:
    plain, wrapped = Net().state_dict(), Net(checkpoint_wrapper).state_dict()
    for path, versions in plain._metadata.items():  # type: ignore[attr-defined]
        assert wrapped._metadata[path] == versions  # type: ignore[attr-defined]


def test_extra_state_is_stored_and_loaded() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    source, target = Counting(1, 1), nn.Sequential(checkpoint_wrapper(Counting(1, 1)))
    source.count = 5
    target.load_state_dict({f"0.{name}": value for name, value in source.state_dict().items()})
    assert target[0].count == 5
    assert target.state_dict()["0._extra_state"] == 5


def test_modules_are_named_as_in_torch() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.ReLU())))
    inner = "0._checkpoint_wrapped_module"
    assert [name for name, _ in model.named_modules()] == ["", "0", inner, f"{inner}.0"]
    assert model.get_submodule(inner)[0] is model[0][0]  # type: ignore[index]
    assert [name for name, _ in model[0].named_children()] == ["_checkpoint_wrapped_module"]


def test_parameters_are_found_by_the_names_they_are_listed_with() -> None:
    model = Net(checkpoint_wrapper)
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter


def test_functional_call_takes_parameters_by_the_names_they_are_listed_with() -> None:
    plain, wrapped, x = Net().eval(), Net(checkpoint_wrapper).eval(), torch.randn(3, 4)
    new = {name: torch.randn_like(parameter, requires_grad=True) for name, parameter in plain.named_parameters()}
    before = list(wrapped.parameters())
    expected = torch.autograd.grad(torch.func.functional_call(plain, new, x).sum(), list(new.values()))
    found = torch.autograd.grad(torch.func.functional_call(wrapped, new, x).sum(), list(new.values()))
    assert_same(list(found), list(expected))
    assert all(one is other for one, other in zip(wrapped.parameters(), before, strict=True))
    inner = torch.func.functional_call(wrapped.first, {"weight": torch.zeros(4, 4), "bias": torch.ones(4)}, x)
    assert torch.equal(inner, torch.ones(3, 4))
    assert list(wrapped.state_dict()) == list(plain.state_dict())


def test_missing_attributes_and_indexing_go_to_the_wrapped_module() -> None:
    linear = nn.Linear(2, 3)
    block: Any = make_block()
    wrapped: Any = checkpoint_wrapper(linear)
    nested: Any = checkpoint_wrapper(offload_wrapper(block))
    assert wrapped.weight is linear.weight
    assert wrapped.in_features == 2
    assert wrapped._checkpoint_wrapped_module is linear
    assert nested[0] is block[0]
    assert list(nested[1:]) == list(block[1:])
    assert list(iter(nested)) == list(block)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'nothing'"):
        _ = wrapped.nothing
    with pytest.raises(TypeError, match="has no len"):
        len(nested)


def test_members_of_the_wrapped_module_are_set_and_deleted_there() -> None:
    block = make_block()
    wrapped: Any = checkpoint_wrapper(checkpoint_wrapper(block))
    block.register_buffer("scale", torch.ones(1))
    replaced = nn.Linear(4, 4)
    setattr(wrapped, "0", replaced)
    wrapped.scale = torch.zeros(1)
    assert block[0] is replaced
    assert torch.equal(block.get_buffer("scale"), torch.zeros(1))
    del wrapped.scale
    assert not hasattr(block, "scale")
    wrapped.note = "of the wrapper"
    assert not hasattr(block, "note")
    linear: Any = checkpoint_wrapper(nn.Linear(2, 2))
    linear.bias = None
    assert list(linear.state_dict()) == ["weight"]


@each_wrap
def test_copies_and_pickles_are_wrappers_of_their_own(wrap: Wrap) -> None:
    model, x = Net(wrap), torch.randn(3, 4)
    expected = step(copy.deepcopy(model), x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.first) is type(model.first)
        assert other.first.weight is not model.first.weight
        assert list(other.state_dict()) == list(model.state_dict())
        other.load_state_dict(model.state_dict())
        assert_same(step(other, x), expected)
    assert copy.copy(model.first).weight is model.first.weight


def test_a_module_with_a_way_to_copy_itself_is_copied_inside_its_wrapper() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> "Own":
            return Own(self.in_features, self.out_features)

    copied = copy.deepcopy(checkpoint_wrapper(Own(2, 2)))
    assert isinstance(copied, CheckpointWrapper)
    assert isinstance(copied._checkpoint_wrapped_module, Own)


def test_the_base_class_says_nothing_about_calls() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ActivationWrapper(nn.Linear(1, 1))  # type: ignore[abstract]


# Applying wrappers over a model.
class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.nested = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.nested(self.lin(x))
        return result


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(Inner(), Inner())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.seq(x)
        return result


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def paths_of_wrappers(model: nn.Module) -> list[str]:
    found = [name for name, module in model.named_modules() if isinstance(module, ActivationWrapper)]
    return [name.replace("_checkpoint_wrapped_module.", "") for name in found]


LINEARS = [f"seq.{i}.{name}" for i in range(2) for name in ("lin", "nested.0")]
POLICIES: dict[str, dict[str, Any]] = {
    "check_fn": {"check_fn": is_linear},
    "lambda policy": {"auto_wrap_policy": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_linear)},
    "module policy": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    "custom policy": {"auto_wrap_policy": CustomPolicy(is_linear)},
}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES.keys())
@each_wrap
def test_chosen_modules_are_wrapped_in_place(wrap: Wrap, options: dict[str, Any]) -> None:
    model, x = Outer(), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, **options)
    assert paths_of_wrappers(model) == LINEARS
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(step(model, x), step(plain, x))


def test_everything_but_the_root_is_wrapped_by_default_and_inner_modules_come_first() -> None:
    model: Any = Outer()
    order = []

    def wrap(module: nn.Module) -> nn.Module:
        order.append(module)
        return checkpoint_wrapper(module)

    expected = [model.seq[0].lin, model.seq[0].nested[0], model.seq[0].nested[1], model.seq[0].nested, model.seq[0]]
    apply_activation_checkpointing(model, wrap)
    assert order[:5] == expected
    assert len(order) == 11  # all but the model itself
    assert not isinstance(model, ActivationWrapper)
    assert isinstance(model.seq, CheckpointWrapper)


def test_a_policy_is_asked_by_keyword_with_what_is_not_wrapped_yet() -> None:
    asked: list[tuple[str, bool, int]] = []

    def policy(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return not isinstance(module, nn.Sequential) if recurse else isinstance(module, nn.Linear)

    apply_activation_checkpointing(Inner(), auto_wrap_policy=policy)
    assert asked == [("Inner", True, 40), ("Linear", True, 20), ("Linear", False, 20), ("Sequential", True, 20)]


def test_fsdp_policies_by_size_see_what_remains() -> None:
    model = Outer()
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=30)
    apply_activation_checkpointing(model, auto_wrap_policy=by_size)
    assert paths_of_wrappers(model) == ["seq.0", "seq.1"]
    model = Outer()
    apply_activation_checkpointing(model, auto_wrap_policy=always_wrap_policy)
    assert len(paths_of_wrappers(model)) == 11


def test_a_custom_policy_gives_options_for_the_wrapper() -> None:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return {"checkpoint_impl": CheckpointImpl.REENTRANT} if isinstance(module, nn.Linear) else False

    model = Outer()
    apply_activation_checkpointing(model, auto_wrap_policy=CustomPolicy(choose))
    wrapper = model.seq[0].lin
    assert isinstance(wrapper, CheckpointWrapper)
    assert wrapper.checkpoint_impl is CheckpointImpl.REENTRANT


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES.keys())
def test_a_shared_module_is_wrapped_once_for_all_its_parents(options: dict[str, Any]) -> None:
    model: Any = Outer()
    shared = model.seq[0].lin
    model.seq[1].lin = model.seq[1].nested[0] = model.seq[0].again = shared
    apply_activation_checkpointing(model, **options)
    wrapper = model.seq[0].lin
    assert isinstance(wrapper, CheckpointWrapper)
    assert wrapper._checkpoint_wrapped_module is shared
    assert model.seq[1].lin is model.seq[1].nested[0] is model.seq[0].again is wrapper
    plain: Any = Outer()
    plain.seq[0].lin = plain.seq[1].lin = plain.seq[1].nested[0] = copy.deepcopy(shared)
    plain.seq[0].nested = copy.deepcopy(model.seq[0].nested)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), plain(x))


def test_a_model_that_contains_itself_is_walked_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].owner = model
    apply_activation_checkpointing(model)
    assert isinstance(model[0], CheckpointWrapper)
    assert model[0].owner is model


def test_wrapper_functions_that_change_the_module_itself_are_taken_as_such() -> None:
    model = Outer()
    apply_activation_checkpointing(model, lambda module: None)
    assert paths_of_wrappers(model) == []
    assert len(list(model.modules())) == 12


@pytest.mark.parametrize("policy", ["linear", 3, {nn.Linear}])
def test_anything_else_is_no_policy(policy: object) -> None:
    with pytest.raises(ValueError, match=r"auto_wrap_policy=.*: expected a function of \(module, recurse, nonwrapped"):
        apply_activation_checkpointing(Outer(), auto_wrap_policy=policy)


def test_a_class_is_not_applied_over_itself() -> None:
    model = Outer()
    apply_activation_checkpointing(model, CheckpointWrapper, is_linear)
    assert paths_of_wrappers(model) == LINEARS
    with pytest.raises(AssertionError, match=r"seq.0.lin is already a CheckpointWrapper"):
        apply_activation_checkpointing(model, CheckpointWrapper, is_linear)
    assert paths_of_wrappers(model) == LINEARS
