"""How much is run again: calls, operators and FLOPs of recomputation, and when there is none at all."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import compat
from recollect.compat import GraphExecGroup, set_checkpoint_early_stop
from tests.corpus import apply
from tests.watching import Counted, Operators, RunsToItsEnd, backward

WIDTH = 8
MATMUL_FLOPS = 2 * WIDTH**3
Region = Callable[..., Any]


def square() -> Tensor:
    return torch.randn(WIDTH, WIDTH, requires_grad=True)


def two_matmuls(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x @ v).tanh() @ w


def flops_of_backward(loss: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        backward(loss)
    return int(counter.get_total_flops())


def operators_of_backward(loss: Tensor, *, keep: bool = False) -> list[str]:
    with Operators() as operators:
        backward(loss, keep=keep)
    return operators.again


# How far recomputation goes


@pytest.mark.parametrize(("early_stop", "matmuls"), [(True, 1), (False, 2)])
def test_flops_run_again_are_those_up_to_the_last_saved_tensor(early_stop: bool, matmuls: int) -> None:
    args = square(), square(), square()
    plain = flops_of_backward(two_matmuls(*args).sum())
    ours = flops_of_backward(recollect.checkpoint(two_matmuls, early_stop=early_stop)(*args).sum())
    assert plain == 4 * MATMUL_FLOPS
    assert ours - plain == matmuls * MATMUL_FLOPS


@pytest.mark.parametrize(("early_stop", "again"), [(True, ["mm", "tanh"]), (False, ["mm", "tanh", "mm"])])
def test_operators_run_again_are_those_up_to_the_last_saved_tensor(early_stop: bool, again: list[str]) -> None:
    region = recollect.checkpoint(two_matmuls, early_stop=early_stop)
    assert operators_of_backward(region(square(), square(), square()).sum()) == again


@pytest.mark.parametrize(("early_stop", "again"), [(True, []), (False, ["sin"])])
def test_only_the_input_saved_enters_the_function_but_runs_no_kernel(early_stop: bool, again: list[str]) -> None:
    fn = Counted(torch.sin)
    assert operators_of_backward(recollect.checkpoint(fn, early_stop=early_stop)(square()).sum()) == again
    assert fn.calls == 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_nothing_saved_means_no_recomputation(early_stop: bool) -> None:
    fn = Counted(lambda x: x.t() + 1)
    backward(recollect.checkpoint(fn, early_stop=early_stop)(square()).sum())
    assert fn.calls == 1


def test_the_last_region_of_a_model_runs_its_loss_again_only_as_far_as_needed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), square()
    again = operators_of_backward(recollect.checkpoint(lambda x: (model(x) ** 2).mean())(x))
    assert again.count("addmm") == 2
    assert "mean" not in again


def test_a_function_that_catches_every_exception_still_stops_early() -> None:
    def stubborn(x: Tensor) -> Tensor:
        try:
            y = (x @ x).exp()
        except Exception:
            y = x * 0
        return y @ y

    x = square()
    loss = recollect.checkpoint(stubborn)(x).sum()
    (expected,) = torch.autograd.grad(stubborn(x).sum(), x)
    backward(loss)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


# How often


@pytest.mark.parametrize("early_stop", [True, False])
def test_each_backward_pass_recomputes_once(early_stop: bool) -> None:
    fn = Counted(lambda x: (x.exp() * x.sin()).tanh() @ x.cos())
    loss = recollect.checkpoint(fn, early_stop=early_stop)(square()).sum()
    for passes in range(1, 4):
        backward(loss, keep=True)
        assert fn.calls == 1 + passes


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_pass_through_several_outputs_recomputes_once(outputs: int) -> None:
    fn = Counted(lambda x: tuple(x.exp().sin() * n for n in range(outputs)))
    backward(torch.stack(recollect.checkpoint(fn)(square())).sum())
    assert fn.calls == 2


def test_a_pass_for_some_inputs_recomputes_once() -> None:
    fn, args = Counted(two_matmuls), (square(), square(), square())
    torch.autograd.grad(recollect.checkpoint(fn)(*args).sum(), args[1:2])
    assert fn.calls == 2


def test_without_grad_mode_the_function_runs_once_and_nothing_is_kept() -> None:
    fn = Counted(torch.exp)
    with torch.no_grad():
        y = recollect.checkpoint(fn)(square())
    assert not y.requires_grad
    assert fn.calls == 1


def test_is_recomputing_is_true_in_recomputation_only() -> None:
    answers = []

    def fn(x: Tensor) -> Tensor:
        answers.append(recollect.is_recomputing())
        return x.exp()

    backward(recollect.checkpoint(fn)(square()).sum())
    assert answers == [False, True]
    assert not recollect.is_recomputing()


# Nesting


def nest(depth: int, early_stop: bool) -> tuple[Region, list[Counted]]:
    """Regions around one another, outermost first, each with work of its own before and after the next."""
    counted: list[Counted] = []

    def wrap(inner: Region) -> Region:
        fn = Counted(lambda x: inner(x.exp().tanh()).sin())
        counted.insert(0, fn)
        return recollect.checkpoint(fn, early_stop=early_stop)

    region: Region = torch.cos
    for _ in range(depth):
        region = wrap(region)
    return region, counted


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_region_runs_again_once_for_itself_and_once_for_each_region_around_it(depth: int, early_stop: bool) -> None:
    region, counted = nest(depth, early_stop)
    backward(region(square()).sum())
    assert [fn.calls for fn in counted] == [2 + place for place in range(depth)]


def test_a_region_at_the_end_of_another_is_not_entered_by_the_outer_recomputation() -> None:
    inner = Counted(lambda x: x.exp().sin())
    outer = Counted(lambda x: recollect.checkpoint(inner)(x.cos()))
    backward(recollect.checkpoint(outer)(square()).sum())
    assert (outer.calls, inner.calls) == (2, 2)


def test_an_inner_value_first_recomputes_the_regions_around_it() -> None:
    order = []

    def say(name: str, fn: Region) -> Region:
        def run(x: Tensor) -> Any:
            order.append(name)
            return fn(x)

        return recollect.checkpoint(run)

    backward(say("outer", lambda x: say("inner", lambda x: x.exp().sin())(x.cos()))(square()).sum())
    assert order == ["outer", "inner", "outer", "inner"]


def test_two_inner_regions_share_the_outer_recomputation() -> None:
    first, second = Counted(lambda x: x.exp().sin()), Counted(lambda x: x.cos().exp())
    outer = Counted(lambda x: recollect.checkpoint(second)(recollect.checkpoint(first)(x).tanh()).tanh())
    backward(recollect.checkpoint(outer)(square()).sum())
    assert (outer.calls, first.calls, second.calls) == (2, 3, 3)


@pytest.mark.parametrize("arrange", ["in a row", "side by side"])
def test_two_thousand_regions_in_one_graph(arrange: str) -> None:
    fn = Counted(lambda x: x.sin() * 1.001)
    region, x = recollect.checkpoint(fn), torch.ones(2, requires_grad=True)
    parts = [x]
    for _ in range(2000):
        parts.append(region(parts[-1] if arrange == "in a row" else x))
    backward(torch.stack(parts).sum())
    assert fn.calls == 4000
    assert x.grad is not None


# Values that autograd has freed already


def two_parts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().sin(), (x @ w).tanh() @ w


@pytest.mark.parametrize("early_stop", [True, False])
def test_values_freed_by_an_earlier_pass_are_not_made_again(early_stop: bool) -> None:
    early, late = recollect.checkpoint(two_parts, early_stop=early_stop)(square(), square())
    assert "mm" in operators_of_backward(late.sum())
    again = operators_of_backward(early.sum())
    assert again[:1] == ["exp"]
    assert ("mm" in again) is not early_stop


def test_a_backward_inside_the_function_frees_what_recomputation_then_skips() -> None:
    def fn(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        y = x.exp()
        (slope,) = torch.autograd.grad((inner @ inner).exp().sum(), inner)
        return y * slope

    x = square()
    again = operators_of_backward(recollect.checkpoint(fn)(x).sum())
    assert again.count("exp") == 2


# Reading saved tensors by hand


class Reader(torch.autograd.Function):
    """Multiplies by the exponential of its input, and reads what it saved as often as told."""

    reads = 1
    holds = True
    kept: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, *more: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y, *more)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Reader.kept = ctx
        held = []
        for _ in range(Reader.reads):
            saved = ctx.saved_tensors
            gradient = gradients[0] * saved[0]
            if Reader.holds:
                held.append(saved)
            del saved
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> type[Reader]:
    monkeypatch.setattr(Reader, "reads", 1)
    monkeypatch.setattr(Reader, "holds", True)
    monkeypatch.setattr(Reader, "kept", None)
    return Reader


def read_through(x: Tensor) -> Any:
    return apply(Reader, x.sin())


@pytest.mark.parametrize("keep", [False, True])
def test_a_second_read_by_the_same_node_is_served(reader: type[Reader], keep: bool) -> None:
    reader.reads = 3
    fn, x = Counted(read_through), square()
    backward(recollect.checkpoint(fn)(x).sum(), keep=keep)
    assert fn.calls == 2
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(read_through(x).sum(), x)[0])


@pytest.mark.parametrize("keep", [False, True])
def test_a_second_read_of_a_value_that_was_let_go_is_right(reader: type[Reader], keep: bool) -> None:
    reader.reads, reader.holds = 3, False
    fn, x = Counted(read_through), square()
    backward(recollect.checkpoint(fn)(x).sum(), keep=keep)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(read_through(x).sum(), x)[0])


def test_a_read_after_the_pass_recomputes(reader: type[Reader]) -> None:
    fn, x = Counted(read_through), square()
    loss = recollect.checkpoint(fn)(x).sum()
    backward(loss, keep=True)
    (value,) = reader.kept.saved_tensors
    assert fn.calls == 3
    assert torch.equal(value, x.sin().exp())


def test_saved_tensors_read_outside_backward_are_recomputed_each_time() -> None:
    fn, x = Counted(lambda x: x.sin().exp()), square()
    y = recollect.checkpoint(fn)(x)
    for reads in range(1, 4):
        assert torch.equal(y.grad_fn._saved_result, y)
        assert fn.calls == 1 + reads
    backward(y.sum())
    assert fn.calls == 5


def test_saved_tensors_read_after_backward_are_freed_as_in_plain_autograd() -> None:
    y = recollect.checkpoint(lambda x: x.sin().exp())(square())
    backward(y.sum())
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = y.grad_fn._saved_result


def test_a_saved_leaf_input_comes_back_as_the_same_object(reader: type[Reader]) -> None:
    x, scale = square(), torch.randn(8, 8)
    y = recollect.checkpoint(lambda x, scale: apply(Reader, x.sin(), scale))(x, scale)
    backward(y.sum(), keep=True)
    assert reader.kept.saved_tensors[1] is scale


# Hooks: backward runs on the original graph


@pytest.mark.parametrize("keep", [False, True])
def test_hooks_inside_a_region_fire_once_per_pass(keep: bool) -> None:
    fired = []

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        if not recollect.is_recomputing():
            y.register_hook(lambda _: fired.append("tensor"))
            assert y.grad_fn is not None
            y.grad_fn.register_hook(lambda *_: fired.append("node"))
        return y.sin()

    backward(recollect.checkpoint(fn)(square()).sum(), keep=keep)
    assert fired == ["tensor", "node"]


def test_hooks_of_an_input_used_inside_and_outside_fire_once() -> None:
    fired = []
    x = square()
    y = x * 2
    for tensor in (x, y):
        tensor.register_hook(lambda _: fired.append(1))
    backward((recollect.checkpoint(lambda y: y.exp().sin())(y) * y.cos()).sum())
    assert len(fired) == 2


def test_hooks_that_the_function_sets_fire_in_recomputation_not_at_all() -> None:
    fired = []

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y.register_hook(lambda _: fired.append(recollect.is_recomputing()))
        return y.sin()

    backward(recollect.checkpoint(fn, early_stop=False)(square()).sum())
    assert fired == [False]


def test_a_backward_started_from_a_hook_during_backward() -> None:
    x = square()
    other = Counted(lambda x: x.cos().exp())
    side = recollect.checkpoint(other)(x).sum()
    (expected_side,) = torch.autograd.grad(x.cos().exp().sum(), x)
    fn = Counted(lambda x: x.exp().sin())
    y = recollect.checkpoint(fn)(x)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    y.register_hook(lambda _: backward(side))
    backward(y.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, expected_side + expected)
    assert (fn.calls, other.calls) == (3, 2)


# Groups of backward calls


def test_backward_calls_of_a_group_share_one_recomputation() -> None:
    fn = Counted(lambda x, w: (x.exp().sin(), w.exp().cos()))
    first, second = compat.checkpoint(fn, square(), square(), use_reentrant=False)
    with GraphExecGroup():
        backward(first.sum())
        backward(second.sum())
    assert fn.calls == 2


def test_backward_calls_in_two_groups_recompute_twice() -> None:
    fn = Counted(lambda x: x.exp().sin())
    loss = compat.checkpoint(fn, square(), use_reentrant=False).sum()
    group = GraphExecGroup()
    for _ in range(2):
        with group:
            backward(loss, keep=True)
    assert fn.calls == 3


def test_overlapping_backward_calls_of_a_group_are_refused() -> None:
    loss = compat.checkpoint(lambda x: x.exp().sin(), square(), use_reentrant=False).sum()
    with GraphExecGroup():
        backward(loss, keep=True)
        with pytest.raises(RuntimeError, match="need the same saved tensor"):
            backward(loss, keep=True)


def test_groups_do_not_nest() -> None:
    with GraphExecGroup():
        with pytest.raises(RuntimeError, match="cannot be nested"), GraphExecGroup():
            pass
        fn = Counted(lambda x: (x.exp(), x.cos()))
        for part in compat.checkpoint(fn, square(), use_reentrant=False):
            backward(part.sum())
        assert fn.calls == 2


# Who says whether recomputation stops early


def calls_until_the_end(*, inside: Any = None, around_backward: Any = None, **options: Any) -> int:
    """How often the last line of a region runs in one step."""
    fn = RunsToItsEnd()
    with inside or nullcontext():
        loss = compat.checkpoint(fn, square(), use_reentrant=False, **options).sum()
    with around_backward or nullcontext():
        backward(loss)
    return fn.ends


@pytest.mark.parametrize("argument", [True, False])
def test_the_argument_says_whether_to_stop_early(argument: bool) -> None:
    assert calls_until_the_end(early_stop=argument) == (1 if argument else 2)


@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("setting", [True, False])
def test_the_setting_beats_the_argument(argument: bool, setting: bool) -> None:
    ends = calls_until_the_end(inside=set_checkpoint_early_stop(setting), early_stop=argument)
    assert ends == (1 if setting else 2)


def test_the_setting_is_read_when_the_region_is_called() -> None:
    assert calls_until_the_end(around_backward=set_checkpoint_early_stop(False)) == 1


@pytest.mark.parametrize("setting", [True, False])
def test_the_innermost_setting_wins_and_the_outer_one_returns(setting: bool) -> None:
    with set_checkpoint_early_stop(not setting):
        assert calls_until_the_end(inside=set_checkpoint_early_stop(setting)) == (1 if setting else 2)
        assert calls_until_the_end() == (2 if setting else 1)
    assert calls_until_the_end() == 1


def test_an_exception_ends_the_setting() -> None:
    with pytest.raises(KeyError), set_checkpoint_early_stop(False):
        raise KeyError
    assert calls_until_the_end() == 1


def test_a_nested_region_finds_in_recomputation_the_setting_of_forward() -> None:
    inner = RunsToItsEnd()
    with set_checkpoint_early_stop(False):
        loss = recollect.checkpoint(lambda x: recollect.checkpoint(inner)(x.cos()).sum())(square())
    backward(loss)
    assert inner.ends == 3
