"""A small network for the engines of torch, the ways to make its blocks regions, and a loop to compare them by.

Everything here runs on ranks. `Net` calls its blocks through a function, so that a region can lie around each block's
call, around all of them, or, by `recollect.apply`, inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect import compat, policies

WIDTH = 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + hidden


Through = Callable[[Iterable[nn.Module], Tensor], Tensor]


def one_by_one(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Net(nn.Module):
    def __init__(self, *, depth: int = 3, dropout: float = 0.1, shares: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shares = shares
        self.through: Through = one_by_one

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(self.layers, self.embed(x))
        if self.shares:
            x = self.through(self.layers, x)
        result: Tensor = self.head(x)
        return result


# Ways to make regions of the blocks.


def _around_each(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = recollect.checkpoint(layer)(x)
    return x


def _around_each_as_torch_has_it(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = compat.checkpoint(layer, x, use_reentrant=False)
    return x


def _around_each_keeping_matmuls(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = recollect.checkpoint(layer, policy=policies.save_matmuls)(x)
    return x


def _around_all(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    return recollect.checkpoint(one_by_one)(layers, x)


def _around_all_keeping_matmuls(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    return recollect.checkpoint(one_by_one, policy=policies.save_matmuls)(layers, x)


AROUND: dict[str, Through] = {
    "around each": _around_each,
    "around each, compat": _around_each_as_torch_has_it,
    "around each, keeping matmuls": _around_each_keeping_matmuls,
    "around all": _around_all,
    "around all, keeping matmuls": _around_all_keeping_matmuls,
}
INSIDE: dict[str, Any] = {
    "inside": recollect.Decision.RECOMPUTE,
    "inside, keeping matmuls": policies.save_matmuls,
}
WAYS = (*INSIDE, *AROUND)
FEW_WAYS = ("inside", "around each", "around all")


def make_regions(net: Net, way: str) -> None:
    """Make the blocks regions, in one of `WAYS`."""
    if way in AROUND:
        net.through = AROUND[way]
    else:
        recollect.apply(net, {"layers.*": INSIDE[way]})


# Training.

Step = tuple[Tensor, dict[str, Tensor]]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    own = getattr(tensor, "to_local", None)
    found: Tensor = tensor if own is None else own()
    return found.detach().clone()


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: local(p.grad) for name, p in net.named_parameters() if p.grad is not None}


def batches(steps: int) -> list[Tensor]:
    """Inputs, other ones on each rank."""
    generator = torch.Generator().manual_seed(1 + distributed.get_rank())
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(steps)]


def train(
    net: nn.Module, *, steps: int = 3, micro_batches: int = 1, unsynced: Callable[[], Any] = nullcontext
) -> list[Step]:
    """Loss and gradients of each step, with an optimizer's step between them.

    Args:
        net: the model.
        steps: how many.
        micro_batches: backward passes per step.
        unsynced: makes the context that all micro batches but the last run in.
    """
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    done: list[Step] = []
    inputs = iter(batches(steps * micro_batches))
    for _ in range(steps):
        for micro_batch in range(micro_batches):
            context: AbstractContextManager[Any] = nullcontext() if micro_batch == micro_batches - 1 else unsynced()
            with context:
                loss = net(next(inputs)).square().mean()
                torch.autograd.backward(loss)
        done.append((loss.detach(), gradients(net)))
        optimizer.step()
        optimizer.zero_grad()
    return done


def assert_same_steps(plain: list[Step], ours: list[Step]) -> None:
    assert len(plain) == len(ours) > 0
    for (loss, gradient), (our_loss, our_gradient) in zip(plain, ours, strict=True):
        assert torch.equal(loss, our_loss)
        assert gradient.keys() == our_gradient.keys()
        assert gradient
        for name, value in gradient.items():
            assert torch.equal(value, our_gradient[name]), name


def averaged(steps: list[Step]) -> list[Step]:
    """Gradients of each rank's own as a data-parallel engine gives them: the mean over ranks."""
    size = distributed.get_world_size()
    for _, gradient in steps:
        for value in gradient.values():
            distributed.all_reduce(value.div_(size))
    return steps


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace an attribute for the block, by a function of what it was."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def noted(what: str) -> Iterator[None]:
    """Say in which case an exception was raised."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {what}")
        raise
