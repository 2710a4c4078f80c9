"""What stood around forward stands around recomputation, and only there."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import recollect
from recollect._core.torch_private.precision import matmul_precision
from tests.watching import Seen, backward, what_is_in_force


class Scale(TorchFunctionMode):
    """Doubles every exponential."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.exp else result


task: contextvars.ContextVar[str] = contextvars.ContextVar("task", default="none")


@contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    """A block in which a global has another value."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype() -> AbstractContextManager[None]:
    return setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def older_matmul_precision() -> AbstractContextManager[None]:
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")


def newer_matmul_precision() -> AbstractContextManager[None]:
    """After it the older way to ask raises an error, until both say the same."""
    return setting(
        matmul_precision,
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value[0]),
        ("tf32", "none"),
    )


def context_variable() -> AbstractContextManager[None]:
    return setting(task.get, task.set, "mine")


AMBIENT: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "autocast dtype": (lambda: torch.autocast("cpu", dtype=torch.float16), lambda: torch.get_autocast_dtype("cpu")),
    "autocast cache": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "function mode": (Scale, lambda: float(torch.zeros(()).exp())),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(0).device.type),
    "sdpa kernel": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "default dtype": (default_dtype, torch.get_default_dtype),
    "matmul precision": (older_matmul_precision, torch.get_float32_matmul_precision),
    "newer matmul precision": (newer_matmul_precision, matmul_precision),
    "context variable": (context_variable, task.get),
    "parametrization cache": (
        nn.utils.parametrize.cached,
        lambda: nn.utils.parametrize._cache_enabled,
    ),
}
each_ambient = pytest.mark.parametrize(("around", "observe"), AMBIENT.values(), ids=AMBIENT)


def observe_step(
    observe: Callable[[], Any],
    *,
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Any, Any]:
    """What forward and recomputation see. Checks that recomputation leaves what it found."""
    seen = Seen[Any]()
    x = torch.ones(2, device="cpu", requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        seen.append(observe())
        return x.sin().cos()

    with around_forward():
        loss = recollect.checkpoint(fn)(x).sum()
    with around_backward():
        before = observe(), what_is_in_force()
        backward(loss)
        assert (observe(), what_is_in_force()) == before
    forward, again = seen
    return forward, again


@each_ambient
def test_what_stood_around_forward_stands_around_recomputation(
    around: Callable[[], AbstractContextManager[Any]], observe: Callable[[], Any]
) -> None:
    forward, again = observe_step(observe, around_forward=around)
    assert forward == again != observe()


@each_ambient
def test_what_stands_around_backward_only_does_not_reach_recomputation(
    around: Callable[[], AbstractContextManager[Any]], observe: Callable[[], Any]
) -> None:
    forward, again = observe_step(observe, around_backward=around)
    assert forward == again == observe()


@each_ambient
def test_what_stands_around_both_is_entered_once(
    around: Callable[[], AbstractContextManager[Any]], observe: Callable[[], Any]
) -> None:
    forward, again = observe_step(observe, around_forward=around, around_backward=around)
    assert forward == again


def test_grad_mode_is_on_in_recomputation_even_where_it_is_off_around_backward() -> None:
    assert observe_step(torch.is_grad_enabled, around_backward=torch.no_grad) == (True, True)


def test_a_context_variable_set_by_recomputation_is_forgotten() -> None:
    def fn(x: Tensor) -> Tensor:
        task.set("leaked" if recollect.is_recomputing() else "kept")
        return x.exp().sin()

    with context_variable():
        loss = recollect.checkpoint(fn, early_stop=False)(torch.ones(2, requires_grad=True)).sum()
        backward(loss)
        assert task.get() == "kept"


def test_the_weight_cache_of_autocast_makes_no_difference() -> None:
    shared, x = nn.Linear(4, 4), torch.randn(2, 4)
    gradients = []
    for region in (shared, recollect.checkpoint(shared)):
        shared.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # The first call fills the cache that the second one reads.
            loss = (region(x) + region(x.sin())).float().sum()
        backward(loss)
        gradients.append([parameter.grad for parameter in shared.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


def test_a_weight_cached_before_the_region_still_gets_its_gradient() -> None:
    shared, x = nn.Linear(4, 4), torch.randn(2, 4)
    gradients = []
    for region in (shared, recollect.checkpoint(shared)):
        shared.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (shared(x) * region(x)).float().sum()
            backward(loss)
        gradients.append(shared.weight.grad)
    first, second = gradients
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_a_function_mode_sees_each_operator_of_the_function_once_per_run() -> None:
    class Log(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Log() as plain:
        x.sin().cos()
    with Log() as log:
        y = recollect.checkpoint(lambda x: x.sin().cos(), early_stop=False)(x)
    assert log.names == plain.names
    backward(y.sum())
    assert log.names == plain.names * 2


# States of the user's own


class Recipe:
    """A global that decides what is computed."""

    scale = 1.0

    @classmethod
    def scaled(cls, value: float) -> AbstractContextManager[None]:
        return setting(lambda: cls.scale, lambda scale: setattr(cls, "scale", scale), value)

    @classmethod
    def capture(cls) -> Callable[[], AbstractContextManager[None]] | None:
        value = cls.scale
        return None if value == 1.0 else lambda: cls.scaled(value)


def scales_of_a_step() -> tuple[Any, Any]:
    return observe_step(lambda: Recipe.scale, around_forward=lambda: Recipe.scaled(3.0))


def test_a_registered_state_is_carried_until_it_is_removed() -> None:
    assert scales_of_a_step() == (3.0, 1.0)
    registration = recollect.register_ambient(Recipe.capture)
    assert scales_of_a_step() == (3.0, 3.0)
    registration.remove()
    registration.remove()
    assert scales_of_a_step() == (3.0, 1.0)


def test_a_registration_can_be_a_block() -> None:
    with recollect.register_ambient(Recipe.capture):
        assert scales_of_a_step() == (3.0, 3.0)
    assert scales_of_a_step() == (3.0, 1.0)


def test_one_of_two_equal_registrations_can_be_removed() -> None:
    with recollect.register_ambient(Recipe.capture):
        recollect.register_ambient(Recipe.capture).remove()
        assert scales_of_a_step() == (3.0, 3.0)


def test_a_state_with_nothing_to_carry_costs_no_context() -> None:
    made = []
    with recollect.register_ambient(lambda: made.append("read")):
        observe_step(lambda: None)
    assert made == ["read"]


def test_an_exception_while_restoring_takes_back_what_was_set() -> None:
    entered = []

    @contextmanager
    def first() -> Iterator[None]:
        entered.append("in")
        try:
            yield
        finally:
            entered.append("out")

    @contextmanager
    def second() -> Iterator[None]:
        raise KeyError
        yield

    with recollect.register_ambient(lambda: first), recollect.register_ambient(lambda: second):
        with default_dtype():
            loss = recollect.checkpoint(lambda x: x.exp().sin())(torch.ones(2, requires_grad=True)).sum()
        before = what_is_in_force()
        with pytest.raises(KeyError):
            backward(loss)
    assert what_is_in_force() == before
    assert entered == ["in", "out"]


@pytest.mark.parametrize("returned", [nullcontext(), {"scale": 1.0}], ids=["context manager", "dict"])
def test_a_state_that_cannot_be_put_back_is_refused_when_it_is_read(returned: Any) -> None:
    with (
        recollect.register_ambient(lambda: returned),
        pytest.raises(TypeError, match=r"register_ambient returned .*: expected None, or a function without arguments"),
    ):
        recollect.checkpoint(torch.sin)(torch.ones(2, requires_grad=True))
