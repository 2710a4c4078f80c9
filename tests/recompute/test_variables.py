"""Variables of closures and globals: recomputation finds in them what forward found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from tests.watching import backward

SCALE: Any = 1.0


def slopes(run: Callable[[Callable[..., Any], Tensor], Tensor], wrap: Callable[..., Any]) -> Tensor:
    """The gradient of an input, where `run` wraps what it makes."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, requires_grad=True)
    backward(run(wrap, x).sum())
    assert x.grad is not None
    return x.grad


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def name_layers_of_a_loop(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    for layer in [nn.Linear(4, 4) for _ in range(3)]:
        x = wrap(lambda x: torch.tanh(layer(x)))(x)  # noqa: B023 (the point)
    return x


def number_layers_in_a_loop(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for i in range(3):
        x = wrap(lambda x: torch.tanh(layers[i](x)))(x)  # noqa: B023
    return x


def close_over_the_input(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    for layer in [nn.Linear(4, 4) for _ in range(3)]:
        x = wrap(lambda: torch.tanh(layer(x)) * x)()  # noqa: B023
    return x


def close_over_a_list(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    for layer in [nn.Linear(4, 4) for _ in range(3)]:
        both = [x, x.exp()]
        x = wrap(lambda: torch.tanh(layer(both[0]) * both[1]))()  # noqa: B023
    return x


def switch_a_flag(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    for is_wide in (True, False, True):
        x = wrap(lambda x: x.sin() if is_wide else x.cos() * x)(x)  # noqa: B023
    return x


def set_a_fraction(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    rate = 1.0

    def decay(x: Tensor) -> Tensor:
        nonlocal rate
        rate *= 0.5
        return x.sin() * rate * x

    for _ in range(3):
        x = wrap(decay)(x)
    assert rate == 0.125
    return x


def set_a_tensor(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    state = torch.ones(4)

    def step(x: Tensor) -> Tensor:
        nonlocal state
        state = torch.tanh(state * x)
        return state.exp() * x

    for _ in range(3):
        x = wrap(step)(x)
    return x


def set_a_global(wrap: Callable[..., Any], x: Tensor) -> Tensor:
    global SCALE

    def scale(x: Tensor) -> Tensor:
        return torch.as_tensor(x.sin() * SCALE * x)

    for SCALE in (0.5, torch.full((4,), 2.0), 3):  # noqa: B007 (`scale` reads it)
        x = wrap(scale)(x)
    return x


@pytest.mark.parametrize(
    "run",
    [
        *(name_layers_of_a_loop, number_layers_in_a_loop, close_over_the_input, close_over_a_list, switch_a_flag),
        *(set_a_fraction, set_a_tensor, set_a_global),
    ],
)
@pytest.mark.parametrize("policy", [None, recollect.policies.save_ops("aten.tanh.default", "aten.sin.default")])
def test_a_variable_that_was_set_since_is_as_forward_found_it(
    run: Callable[[Callable[..., Any], Tensor], Tensor], policy: Any
) -> None:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return recollect.checkpoint(fn, policy=policy)

    assert torch.equal(slopes(run, wrap), slopes(run, plain))


def test_a_variable_is_afterwards_what_it_was_before() -> None:
    at: Any = "before"

    def fn(x: Tensor) -> Tensor:
        return x.sin() if at == "before" else x.cos().exp()

    x = torch.ones(2, requires_grad=True)
    y = recollect.checkpoint(fn)(x)
    at = object()
    after = at
    backward(y.sum())
    assert at is after
    assert torch.equal(torch.as_tensor(x.grad), x.detach().cos())


def test_a_number_that_the_function_counts_up_goes_on() -> None:
    calls, x = 0, torch.ones(2, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin().exp()

    backward(recollect.checkpoint(fn)(x).sum())
    assert calls == 2


def test_a_backward_inside_the_function_leaves_variables_alone() -> None:
    def fn(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        factor = 2.0
        y = recollect.checkpoint(lambda: inner.sin() * factor * inner)()
        factor = 3.0
        (slope,) = torch.autograd.grad(y.sum(), inner)
        return x * slope * factor

    x = torch.ones(2, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    (found,) = torch.autograd.grad(recollect.checkpoint(fn)(x).sum(), x)
    assert torch.equal(found, expected)


def test_a_variable_that_is_not_set_yet_is_left_alone() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * (rate if is_late else 2.0)

    is_late, x = False, torch.ones(2, requires_grad=True)
    y = recollect.checkpoint(fn)(x)
    rate = 3.0
    backward(y.sum())
    assert rate == 3.0
    assert torch.equal(torch.as_tensor(x.grad), x.detach().cos() * 2)


def test_a_tensor_that_was_written_into_before_its_variable_was_set_is_an_error() -> None:
    held, x = torch.ones(2) * 2, torch.ones(2, requires_grad=True)
    y = recollect.checkpoint(lambda: x.sin() * held * x, name="scaled")()
    held.add_(1)
    held = torch.ones(2)
    with pytest.raises(recollect.ChangedInputError) as caught:
        backward(y.sum())
    assert str(caught.value) == (
        "region 'scaled': a tensor of shape [2] that the function closes over was changed in place after the region "
        "was entered, and its variable has since been set to another tensor.\n"
        "Recomputation would read the new values. Use the out-of-place form of that operation, or pass the tensor as "
        "an argument."
    )
    assert torch.equal(held, torch.ones(2))


def test_an_inference_tensor_may_be_closed_over() -> None:
    with torch.inference_mode():
        held = torch.ones(2)
    x = torch.ones(2, requires_grad=True)
    y = recollect.checkpoint(lambda: (x + held).sin())()
    held = torch.zeros(2)
    backward(y.sum())
    assert torch.equal(torch.as_tensor(x.grad), (x.detach() + 1).cos())


def test_compat_reads_variables_as_torch_does() -> None:
    rate, x = 1.0, torch.ones(2, requires_grad=True)
    y = compat.checkpoint(lambda x: x.sin() * rate * x, x, use_reentrant=False)
    rate = 2.0
    backward(y.sum())
    assert not torch.equal(torch.as_tensor(x.grad), x.detach().cos() + x.detach().sin())
