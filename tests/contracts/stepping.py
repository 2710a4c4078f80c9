"""A step through a case of the corpus, by each way to ask for gradients, and all that it leaves behind."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree

import recollect
from tests.corpus import Call, Case

Derive = Callable[[Tensor, Sequence[Tensor]], list[Any]]


# Ways to ask for gradients


def by_backward(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    torch.autograd.backward(loss)
    return [tensor.grad for tensor in wanted]


def by_backward_twice(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    return [tensor.grad for tensor in wanted]


def by_grad(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def by_backward_to_some(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    for tensor in wanted:
        torch.autograd.backward(loss, inputs=[tensor], retain_graph=True)
    return [tensor.grad for tensor in wanted]


def by_double_backward(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    torch.autograd.backward(to_loss(first))
    return [*first, *(tensor.grad for tensor in wanted)]


def to_loss(outputs: Any) -> Tensor:
    """A number that every differentiable output has a nonlinear part in."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in _pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + real.double().sin().sum()
    return total


class Outcome:
    """All that a step leaves behind, as tensors."""

    def __init__(self, call: Call, outputs: Any, gradients: list[Any]) -> None:
        self.outputs = [leaf for leaf in _pytree.tree_leaves(outputs) if leaf is not None]
        self.gradients = gradients
        self.buffers = call.buffers()
        self.random_states = [generator.get_state() for generator in call.generators()]


def run_step(case: Case, engine: Callable[[Callable[..., Any]], Callable[..., Any]], derive: Derive) -> Outcome:
    torch.manual_seed(0)
    call = case.build()
    fn = engine(call.fn)
    torch.manual_seed(1)
    with case.around():
        outputs = fn(*call.args, **call.kwargs)
    loss = to_loss(outputs)
    torch.rand(1)  # backward does not start where forward ended
    return Outcome(call, outputs, derive(loss, call.parameters()))


@functools.cache
def plain_step(case: Case, derive: Derive) -> Outcome:
    with mock.patch.object(recollect, "checkpoint", lambda fn, **_: fn):
        return run_step(case, lambda fn: fn, derive)


def is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or one.stride() != other.stride():
        return False
    return torch.equal(one.resolve_conj(), other.resolve_conj())
