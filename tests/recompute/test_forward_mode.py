"""Regions under forward-mode differentiation (`torch.autograd.forward_ad`): backward through tangents is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import recollect
from recollect import compat
from tests.watching import backward

# torch compiles its rules for tangents when the first level is entered.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

X, TANGENT = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 12).reshape(3, 4)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def gradients(wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]], *, inside: bool) -> list[Tensor]:
    """Of a loss of values and tangents, with backward inside the level or after it."""
    module, x = block(), X.clone().requires_grad_()
    tangent = TANGENT.clone().requires_grad_()
    with forward_ad.dual_level():
        y, moved = forward_ad.unpack_dual(wrap(module)(forward_ad.make_dual(x, tangent)))
        loss = y.square().sum() + moved.square().sum()
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    found = [x.grad, tangent.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(gradient is not None for gradient in found[:2])
    return [gradient for gradient in found if gradient is not None]


def nested(module: nn.Sequential) -> Callable[[Tensor], Tensor]:
    first: Callable[[Tensor], Tensor] = recollect.checkpoint(module[:2])
    rest: Callable[[Tensor], Tensor] = module[2:]
    return recollect.checkpoint(lambda x: rest(first(x)))


def in_turn(module: nn.Sequential) -> Callable[[Tensor], Tensor]:
    first: Callable[[Tensor], Tensor] = recollect.checkpoint(module[:1])
    rest: Callable[[Tensor], Tensor] = recollect.checkpoint(module[1:])
    return lambda x: rest(first(x))


WRAPS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "region": recollect.checkpoint,
    "nested": nested,
    "in turn": in_turn,
    "compat": lambda module: lambda x: compat.checkpoint(module, x, use_reentrant=False),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("way", WRAPS)
def test_gradients_of_tangents_are_the_plain_ones(way: str, inside: bool) -> None:
    expected = gradients(lambda module: module, inside=inside)
    found = gradients(WRAPS[way], inside=inside)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_tensor_without_a_tangent_has_none_in_recomputation() -> None:
    linear = nn.Linear(4, 4)
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, TANGENT)
        y = recollect.checkpoint(lambda a, b: torch.tanh(linear(a)) * torch.tanh(b))(dual, x)
        (ours,) = torch.autograd.grad(forward_ad.unpack_dual(y).tangent.sum(), linear.weight)
        y = torch.tanh(linear(dual)) * torch.tanh(x)
        (plain,) = torch.autograd.grad(forward_ad.unpack_dual(y).tangent.sum(), linear.weight)
    assert torch.equal(ours, plain)
