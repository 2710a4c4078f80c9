"""Steps through a region under a policy, held against plain ones on the same data."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import recollect
from recollect._policy.base import PolicyLike
from tests.watching import backward

STEPS = 3
SIZE = 4


def square() -> Tensor:
    return torch.randn(SIZE, SIZE, requires_grad=True)


def squares(count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(square() for _ in range(count))


def to_loss(outputs: Any) -> Tensor:
    leaves = [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.double().cos().sum() for leaf in leaves]).sum()


def outcome(
    fn: Callable[..., Any], args: Sequence[Any], wanted: Sequence[Tensor], *, seed: int, twice: bool
) -> list[Any]:
    """Outputs, gradients and the generator of one step."""
    for tensor in wanted:
        tensor.grad = None
    torch.manual_seed(seed)
    outputs = fn(*args)
    kept = [leaf.detach().clone() for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    loss = to_loss(outputs)
    if twice:
        backward(loss, keep=True)
    backward(loss)
    return [*kept, *(None if tensor.grad is None else tensor.grad for tensor in wanted), torch.get_rng_state()]


def assert_like_plain(
    fn: Callable[..., Any],
    policy: PolicyLike,
    make: Callable[[], tuple[Any, ...]],
    *,
    twice: bool = False,
    module: nn.Module | None = None,
    **options: Any,
) -> None:
    """Three steps on fresh data each are bitwise the plain ones; buffers, too, where a module is given."""
    region = recollect.checkpoint(fn, policy=policy, **options)
    root = module if module is not None else fn if isinstance(fn, nn.Module) else nn.Module()
    for step in range(STEPS):
        torch.manual_seed(1000 + step)
        args = make()
        wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad] + list(root.parameters())
        before = [buffer.clone() for buffer in root.buffers()]
        plain = outcome(fn, args, wanted, seed=step, twice=twice)
        plain += [buffer.clone() for buffer in root.buffers()]
        with torch.no_grad():
            for buffer, value in zip(root.buffers(), before, strict=True):
                buffer.copy_(value)
        ours = outcome(region, args, wanted, seed=step, twice=twice)
        ours += [buffer.clone() for buffer in root.buffers()]
        assert len(plain) == len(ours)
        for place, (one, other) in enumerate(zip(plain, ours, strict=True)):
            assert (one is None) == (other is None), (step, place)
            assert one is None or torch.equal(one, other), (step, place)
