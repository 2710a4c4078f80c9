"""An exception at any point leaves nothing behind: no hook, no mode, no changed state; the next step is a good one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from tests.watching import Operators, backward, what_is_in_force


class Boom(Exception):  # noqa: N818 (reads better where it is raised)
    """Raised by these tests."""


class Stop(BaseException):
    """Raised by these tests; not an `Exception`, as a keyboard interrupt is not."""


class Context(AbstractContextManager[None]):
    """Raises where it is told to, and notes what it is given."""

    def __init__(self, *, enter: bool = False, leave: bool = False, swallow: bool = False) -> None:
        self._enter, self._leave, self._swallow = enter, leave, swallow
        self.given: list[BaseException | None] = []

    def __enter__(self) -> None:
        if self._enter:
            raise Boom

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.given.append(error)
        if self._leave:
            raise Boom
        return self._swallow


class Model(nn.Module):
    """Draws random numbers and updates buffers, and raises in forward or in recomputation, early or late."""

    def __init__(self, raise_in: str | None = None, error: type[BaseException] = Boom) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.power = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self._raise_in, self._error = raise_in, error

    def forward(self, x: Tensor) -> Tensor:
        now = "recomputation" if recollect.is_recomputing() else "forward"
        y: Tensor = torch.dropout(self.first(x), 0.5, train=True)
        if self._raise_in == f"early in {now}":
            raise self._error
        y = self.last(self.power(self.norm(y).tanh()).tanh())
        if self._raise_in == f"late in {now}":
            raise self._error
        return y


POINTS = ["early in forward", "late in forward", "early in recomputation", "late in recomputation"]
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
    "explanation": recollect.explain_mismatch,
    "operator mode": Operators,
}


def attempt(
    model: nn.Module, *, around: Callable[[], AbstractContextManager[Any]] = nullcontext, **options: Any
) -> None:
    """A step that fails somewhere. Checks that what was in force before is in force after."""
    x = torch.randn(6, 4, requires_grad=True)
    with around():
        before = what_is_in_force()
        forward_done = False
        try:
            y = compat.checkpoint(model, x, use_reentrant=False, early_stop=False, **options)
            forward_done = True
        except BaseException:
            assert what_is_in_force() | {"random state": None} == before | {"random state": None}
            raise
    assert forward_done
    before, buffers = what_is_in_force(), [buffer.clone() for buffer in model.buffers()]
    training = [module.training for module in model.modules()]
    try:
        backward(y.sum())
    finally:
        assert what_is_in_force() == before
        assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
        assert training == [module.training for module in model.modules()]


def assert_next_step_is_good(model: nn.Module) -> None:
    """The same step, plain and checkpointed, gives the same gradients after all that happened."""
    x = torch.randn(6, 4)
    gradients = []
    for run in (model, recollect.checkpoint(model)):
        torch.manual_seed(3)
        model.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        backward(run(x).sum())
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("error", [Boom, Stop])
@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_of_the_function_leaves_nothing_behind(
    point: str, around: Callable[[], AbstractContextManager[Any]], error: type[BaseException]
) -> None:
    model = Model(point, error)
    with pytest.raises(error):
        attempt(model, around=around)
    model._raise_in = None
    assert_next_step_is_good(model)


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_a_mismatch_leaves_nothing_behind(around: Callable[[], AbstractContextManager[Any]]) -> None:
    model = Model()

    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            return self.model(x[:3] if recollect.is_recomputing() else x)

    with pytest.raises(recollect.MismatchError):
        attempt(Shrinking(), around=around)
    assert_next_step_is_good(model)


@pytest.mark.parametrize("change", ["argument", "parameter"])
def test_a_refused_change_leaves_nothing_behind(change: str) -> None:
    model, x = Model(), torch.randn(6, 4)
    y = recollect.checkpoint(model)(x)
    with torch.no_grad():
        (x if change == "argument" else model.first.weight).add_(1)
    before = what_is_in_force()
    with pytest.raises(recollect.ChangedInputError):
        backward(y.sum())
    assert what_is_in_force() == before
    assert_next_step_is_good(model)


@pytest.mark.parametrize("which", ["forward", "recomputation"])
@pytest.mark.parametrize("when", ["enter", "leave"])
def test_an_exception_of_a_context_leaves_nothing_behind(which: str, when: str) -> None:
    model = Model()
    contexts = {"forward": Context(), "recomputation": Context()} | {which: Context(**{when: True})}
    with pytest.raises(Boom):
        attempt(model, context_fn=lambda: tuple(contexts.values()))
    assert_next_step_is_good(model)


def test_an_exception_of_context_fn_itself_leaves_nothing_behind() -> None:
    def context_fn() -> Any:
        raise Boom

    model = Model()
    with pytest.raises(Boom):
        attempt(model, context_fn=context_fn)
    assert_next_step_is_good(model)


def test_the_log_is_left_when_the_forward_context_raises() -> None:
    contexts = Context(leave=True), Context()
    model = Model()
    with pytest.raises(Boom):
        attempt(model, context_fn=lambda: contexts, around=recollect.explain_mismatch)
    assert_next_step_is_good(model)


@pytest.mark.parametrize("error", [Boom, Stop])
@pytest.mark.parametrize("point", POINTS)
def test_a_context_gets_the_exception_once(point: str, error: type[BaseException]) -> None:
    forward, recomputation = Context(), Context()
    with pytest.raises(error) as caught:
        attempt(Model(point, error), context_fn=lambda: (forward, recomputation))
    if "forward" in point:
        assert (forward.given, recomputation.given) == ([caught.value], [])
    else:
        assert (forward.given, recomputation.given) == ([None], [caught.value])


def test_a_forward_context_that_swallows_the_exception_is_an_error() -> None:
    forward = Context(swallow=True)
    with pytest.raises(RuntimeError, match="swallowed") as caught:
        attempt(Model("late in forward"), context_fn=lambda: (forward, Context()))
    assert isinstance(caught.value.__cause__, Boom)
    assert forward.given == [caught.value.__cause__]


def test_a_recompute_context_does_not_see_the_early_stop_as_an_error_of_the_function() -> None:
    recomputation = Context()
    y = compat.checkpoint(
        lambda x: x.exp().sin().cos(),
        torch.ones(2, requires_grad=True),
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), recomputation),
    )
    backward(y.sum())
    assert len(recomputation.given) == 1
    assert not isinstance(recomputation.given[0], (Boom, RuntimeError))


def test_a_recompute_context_that_swallows_everything_changes_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    contexts = nullcontext(), Context(swallow=True)
    y = compat.checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False, context_fn=lambda: contexts)
    backward(y.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_a_nested_region_leaves_nothing_behind(point: str, depth: int) -> None:
    model = Model(point)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            region: Callable[..., Any] = self.model
            for _ in range(depth - 1):
                region = recollect.checkpoint(region, early_stop=False)
            return region(x.exp()).sin()

    with pytest.raises(Boom):
        attempt(Nested())
    model._raise_in = None
    assert_next_step_is_good(model)


@pytest.mark.parametrize("point", POINTS)
def test_an_exception_in_the_reentrant_engine_leaves_nothing_behind(point: str) -> None:
    model, x = Model(point), torch.randn(6, 4, requires_grad=True)
    before = what_is_in_force() | {"random state": None}
    with pytest.raises(Boom):
        backward(compat.checkpoint(model, x, use_reentrant=True).sum())
    assert what_is_in_force() | {"random state": None} == before
    model._raise_in = None
    assert_next_step_is_good(model)


def test_a_backward_that_failed_can_be_run_again() -> None:
    x, tries = torch.ones(2, requires_grad=True), list[int]()

    def fn(x: Tensor) -> Tensor:
        y = x.exp().sin()
        if recollect.is_recomputing():
            tries.append(1)
            if len(tries) == 1:
                raise Boom
        return y

    loss = recollect.checkpoint(fn, early_stop=False)(x).sum()
    with pytest.raises(Boom):
        backward(loss)
    backward(loss)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_a_pass_that_failed_elsewhere_does_not_spoil_the_next_one() -> None:
    x = torch.ones(2, requires_grad=True)
    fails = [True]

    def hook(_: Tensor) -> None:
        if fails:
            fails.pop()
            raise Boom

    y = x * 3
    y.register_hook(hook)
    loss = recollect.checkpoint(lambda y: y.exp().sin())(y).sum()
    with pytest.raises(Boom):
        backward(loss, keep=True)
    backward(loss)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad((x * 3).exp().sin().sum(), x)[0])


def test_an_exception_ends_the_explanations() -> None:
    with pytest.raises(Boom), recollect.explain_mismatch():
        raise Boom
    region = recollect.checkpoint(lambda x: x[: 1 if recollect.is_recomputing() else 2].exp())
    y = region(torch.ones(2, requires_grad=True))
    with pytest.raises(recollect.MismatchError, match="To see both operator logs"):
        backward(y.sum())


@pytest.mark.parametrize("thing", ["hook", "mode", "dtype", "random"])
def test_the_check_of_what_is_in_force_can_fail(thing: str) -> None:
    before = what_is_in_force()
    around: AbstractContextManager[Any] = nullcontext()
    if thing == "hook":
        around = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    elif thing == "mode":
        around = Operators()
    elif thing == "dtype":
        around = torch.autocast("cpu", dtype=torch.bfloat16)
    else:
        torch.rand(1)
    with around:
        assert what_is_in_force() != before
