"""After a failure, and where a path cannot do what an option asks, nothing is silently wrong."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from recollect._core.registry import Registry
from tests.watching import backward


@pytest.mark.parametrize("check", ["metadata", "values"])
def test_a_failed_recomputation_leaves_no_value_for_the_next_pass(check: Any) -> None:
    factor = [torch.ones(2)]
    x = torch.ones(2, requires_grad=True)
    loss = recollect.checkpoint(lambda x: (x * factor[0]).sin(), check=check)(x).sum()
    factor[0] = torch.full((2,), 2.0, dtype=torch.float64 if check == "metadata" else torch.float32)
    for _ in range(2):
        with pytest.raises(recollect.MismatchError):
            backward(loss, keep=True)
    factor[0] = torch.ones(2)
    backward(loss)
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_values_of_large_tensors_are_checked() -> None:
    x = torch.randn(1500, 1500, requires_grad=True)
    backward(recollect.checkpoint(lambda x: x.sin().exp(), check="values")(x).sum())


def test_a_transform_takes_none_among_the_outputs() -> None:
    gradient = torch.func.grad(lambda x: recollect.checkpoint(lambda x: (x.sin(), None))(x)[0].sum())
    assert torch.equal(gradient(torch.ones(2)), torch.ones(2).cos())


def test_a_transform_refuses_to_check_values_and_compares_outputs() -> None:
    with pytest.raises(ValueError, match=r"check='values' does not work inside a torch\.func transform"):
        torch.func.grad(lambda x: recollect.checkpoint(torch.sin, check="values")(x).sum())(torch.ones(2))
    width = [2]

    def widened(x: Tensor) -> Tensor:
        return (x[:, None] * torch.ones(width[0])).sin()

    def loss(x: Tensor) -> Tensor:
        out = recollect.checkpoint(widened)(x)
        width[0] = 3
        return out.sum()

    with pytest.raises(recollect.MismatchError, match=r"returned float32\[2, 2\] in forward and float32\[2, 3\]"):
        torch.func.grad(loss)(torch.ones(2))


def by_keyword_default(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor, *, layer: nn.Module = layer) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    return fn


def in_container(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    def build(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        held = make(layer)
        return lambda x: next(iter(held.values() if isinstance(held, dict) else held))(x)

    return build


@pytest.mark.parametrize(
    "build",
    [by_keyword_default, in_container(lambda m: OrderedDict(a=m)), in_container(lambda m: deque([m]))],
    ids=["keyword default", "ordered dict", "deque"],
)
def test_statistics_are_updated_once_wherever_a_function_keeps_its_module(
    build: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    layer = nn.BatchNorm1d(3)
    backward(recollect.checkpoint(build(layer))(torch.randn(4, 3, requires_grad=True)).sum())
    assert layer.num_batches_tracked.item() == 1  # type: ignore[union-attr]


class Rotary(nn.Module):
    """Has a buffer, so that its first call is a trial with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError


@pytest.mark.parametrize("run", ["native", "reentrant", "transform", "contexts"])
def test_no_hook_stays_on_a_module_whose_first_call_raises(run: str) -> None:
    class Fresh(Rotary):
        """A class that no other test has called."""

    module = Fresh()
    x = torch.ones(3, requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        "native": lambda: recollect.checkpoint(module)(x),
        "reentrant": lambda: compat.checkpoint(module, x, use_reentrant=True),
        "transform": lambda: torch.func.grad(lambda x: recollect.checkpoint(module)(x).sum())(x),
        "contexts": lambda: compat.checkpoint(module, x, use_reentrant=False, context_fn=lambda: (1, 2)),  # type: ignore[arg-type, return-value]
    }
    with pytest.raises((KeyError, TypeError)):
        calls[run]()
    assert not module._forward_pre_hooks


def test_an_ambient_context_that_raises_on_leaving_leaves_the_rest_restored() -> None:
    class Broken:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            raise KeyError

    layer = nn.Dropout(0.5)
    x = torch.ones(8, requires_grad=True)
    with recollect.register_ambient(lambda: Broken):
        loss = recollect.checkpoint(layer)(x).sum()
        layer.eval()
        state = torch.get_rng_state()
        with pytest.raises(KeyError):
            backward(loss)
    assert layer.training is False
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_that_leaked_from_a_region_gives_its_gradient_once_or_an_error() -> None:
    leaked: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        if not recollect.is_recomputing():
            leaked.append(x.exp())
        else:
            x.exp()
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    backward(recollect.checkpoint(fn)(x).sum())
    x.grad = None
    backward(leaked[0].sum(), keep=True)
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]
    with pytest.raises(recollect.CheckpointError, match="left the region other than as its result"):
        backward(leaked[0].sum())


def test_other_outputs_of_a_reentrant_recomputation_are_named() -> None:
    def fn(x: Tensor) -> Any:
        return x.sin() if recollect.is_recomputing() else (x.sin(), x.cos())

    out = compat.checkpoint(fn, torch.ones(2, requires_grad=True), use_reentrant=True)
    with pytest.raises(recollect.MismatchError, match="returned 2 outputs in forward and 1 in recomputation"):
        backward(out[0].sum())


def test_the_same_constant_twice_is_the_same_object_again() -> None:
    same: list[bool] = []

    def fn(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        same.append(one is other)
        return (x * one * other).sin()

    constant = torch.ones(2)
    backward(recollect.checkpoint(fn)(torch.ones(2, requires_grad=True), constant, constant).sum())
    assert same == [True, True]


def test_a_registration_made_twice_is_removed_one_at_a_time() -> None:
    registry: Registry[str] = Registry()
    first, second = registry.add("a"), registry.add("a")
    first.remove()
    first.remove()
    assert list(registry.items) == ["a"]
    second.remove()
    assert list(registry.items) == []


def test_a_registered_attribute_may_be_made_by_forward() -> None:
    class Late(nn.Linear):
        count: int

        def forward(self, x: Tensor) -> Tensor:
            self.count = getattr(self, "count", 0) + 1
            return super().forward(x).sin()

    layer = Late(2, 2)
    with recollect.register_state(Late, "count"):
        for step in range(1, 3):
            backward(recollect.checkpoint(layer)(torch.ones(1, 2)).sum())
            assert layer.count == step


def test_arguments_given_along_with_the_function_are_sent_where_they_belong() -> None:
    with pytest.raises(
        TypeError,
        match=r"was given 2 arguments in addition to the function[^\n]*\nWrite recollect\.checkpoint\(fn\)\(\*args\)",
    ):
        recollect.checkpoint(torch.sin, torch.ones(2), torch.ones(2))  # type: ignore[call-overload]
