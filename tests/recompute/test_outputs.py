"""Regions with several outputs let their inputs go as soon as a pass cannot need them again."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import recollect
from recollect import policies

Note = Callable[[], None]
Fn = Callable[[Tensor, Tensor, Note], tuple[Tensor, Tensor]]


class Probe(torch.autograd.Function):
    """Calls back when a pass comes to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Note) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


def probe(x: Tensor, note: Note) -> Tensor:
    out: Tensor = Probe.apply(x, note)  # type: ignore[no-untyped-call]
    return out


def passing_on(h: Tensor, bias: Tensor, note: Note) -> tuple[Tensor, Tensor]:
    y = probe((h * 2).exp(), note) + bias
    return y.tanh(), bias


def with_a_byproduct(h: Tensor, bias: Tensor, note: Note) -> tuple[Tensor, Tensor]:
    y = probe((h * 2).exp(), note) + bias
    return y.tanh(), y.sin()


@pytest.mark.parametrize("fn", [passing_on, with_a_byproduct])
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.exp.default")], ids=["full", "exp kept"])
def test_inputs_go_once_what_was_saved_is_made_again(fn: Fn, policy: Any) -> None:
    region = recollect.checkpoint(fn, policy=policy)
    for _ in range(4):
        leaf = torch.randn(8, requires_grad=True)
        are_gone: list[bool] = []
        (expected,) = torch.autograd.grad(fn(leaf, leaf, list)[0].sum(), [leaf])  # type: ignore[arg-type]
        h, bias = leaf * 1, leaf * 1
        memory = ref(h.untyped_storage())

        def note(memory: ref[Any] = memory, are_gone: list[bool] = are_gone) -> None:
            are_gone.append(memory() is None)

        y, _ = region(h, bias, note)
        del h, bias, _
        y.sum().backward()
        assert are_gone == [True]
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected)


def test_both_outputs_may_be_used_one_after_the_other() -> None:
    leaf = torch.randn(8, requires_grad=True)
    one, other = with_a_byproduct(leaf, leaf, list)  # type: ignore[arg-type]
    expected = torch.autograd.grad(one.sum() + other.sum(), [leaf])
    outputs = recollect.checkpoint(with_a_byproduct)(leaf * 1, leaf * 1, list)  # type: ignore[arg-type]
    first = torch.autograd.grad(outputs[0].sum(), [leaf], retain_graph=True)
    second = torch.autograd.grad(outputs[1].sum(), [leaf])
    torch.testing.assert_close(first[0] + second[0], expected[0])
