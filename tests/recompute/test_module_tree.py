"""Blocks that are wrapped anew at each call share what was found of them, as long as it holds."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._recompute import module_tree
from tests.collecting import without_collector
from tests.watching import backward


class Block(nn.Module):
    """Has inner modules, a number, and room for a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = nn.Linear(4, 4)
        self.second: Any = nn.Linear(4, 4)
        self.scale = 1.0
        self.gain: float
        self.seen: list[float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)) * self.scale
        if self.seen is not None:
            self.seen.append(float(y.detach().sum()))
        gain = getattr(self, "gain", None)
        y = y if gain is None else y * gain
        return torch.tanh(self.second(y))


def _replace_part(block: Block) -> None:
    block.second = nn.Linear(4, 4)


def _replace_parameter(block: Block) -> None:
    block.first.weight = nn.Parameter(torch.randn(4, 4))


def _add_attribute(block: Block) -> None:
    block.gain = 3.0


def _add_part(block: Block) -> None:
    block.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _begin_to_collect(block: Block) -> None:
    block.seen = []


def _set_number(block: Block) -> None:
    block.scale = 2.0


CHANGES: list[Callable[[Block], None]] = [
    *(_replace_part, _replace_parameter, _add_attribute, _add_part, _begin_to_collect, _set_number),
]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_block_that_is_wrapped_anew_may_change_between_calls(change: Callable[[Block], None]) -> None:
    results: list[list[Any]] = []
    for wrap in (lambda fn: fn, recollect.checkpoint):
        torch.manual_seed(0)
        block, x, found = Block(), torch.ones(2, 4, requires_grad=True), list[Any]()
        for step in range(4):
            if step == 2:
                change(block)
            loss = wrap(block)(x).sum()
            if step == 3:  # between forward and backward, too
                block.scale, block.first.weight = 5.0, nn.Parameter(block.first.weight.detach().clone())
            backward(loss)
            assert x.grad is not None
            found += [loss.item(), x.grad.clone(), None if block.seen is None else len(block.seen)]
        results.append(found)
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours) if isinstance(plain, Tensor) else plain == ours


gain = 2.0


def test_a_class_may_be_given_another_forward_between_calls() -> None:
    global gain  # noqa: PLW0603

    class Patched(Block):
        pass

    def amplified(self: Patched, x: Tensor) -> Tensor:
        return torch.tanh(Block.forward(self, x)).exp() * gain

    results = []
    for wrap in (lambda fn: fn, recollect.checkpoint):
        torch.manual_seed(0)
        Patched.forward = Block.forward  # type: ignore[method-assign]
        block, x, gain = Patched(), torch.ones(2, 4, requires_grad=True), 2.0
        for step in range(3):
            if step == 1:
                Patched.forward = amplified  # type: ignore[assignment,method-assign]
            loss = wrap(block)(x).sum()
            gain += 1.0  # before backward
            backward(loss)
        results.append(x.grad)
    plain, ours = results
    assert plain is not None
    assert ours is not None
    assert torch.equal(plain, ours)


def test_what_was_found_keeps_no_module_alive() -> None:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parents = [parent]  # a way back to the root
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

    with without_collector():
        block = Block()
        block.first = Child(block)
        for _ in range(2):
            backward(recollect.checkpoint(block)(torch.ones(2, 4)).sum())
        assert block in module_tree._known
        block.first.parents.clear()
        gone = weakref.ref(block)
        del block
        assert gone() is None
