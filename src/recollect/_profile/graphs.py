"""What the graphs of a step hold for backward, read off their nodes.

A graph that backward comes to is read when its pass begins, and nothing of it is released yet. Others are read while
forward goes on, for they may be gone before it ends: a quantizer, an `argmax` or `detach` cuts them off. What their
nodes have saved lives as long as one of their tensors; a region lets go of it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from recollect._core.torch_private.engine import sequence_of
from recollect._core.torch_private.graph import NodeValue, leaf_of, read_node, walk
from recollect._profile.raw import RawSaved

Unfold = Callable[[NodeValue], Iterable[Tensor]]
"""The tensors behind a saved one, which hooks may have packed; how regions hold theirs is not known here."""

NumbersOf = Callable[[Tensor], list[int]]
"""The numbers of a tensor's storages."""


class Graphs:
    """The nodes that were met, by number, and what they have saved. Holds neither nodes nor tensors.

    Args:
        unfold: see `Unfold`.
    """

    def __init__(self, unfold: Unfold) -> None:
        self._unfold = unfold
        self._reached: list[RawSaved] = []
        self._walked: set[int] = set()
        self._met: dict[int, list[int]] = {}

    def is_known(self, node: Any) -> bool:
        """Whether the graph behind a node was read for a backward pass."""
        return sequence_of(node) in self._walked

    def read_behind(self, node: Any, numbers_of: NumbersOf, meet_leaf: Callable[[Tensor], None]) -> None:
        """A backward pass begins with this node: read the graph behind it; `meet_leaf` is called with its leaves."""
        for found in walk([node]):
            leaf = leaf_of(found)
            if leaf is not None:
                meet_leaf(leaf)
                continue
            sequence = sequence_of(found)
            if sequence in self._walked:
                continue
            self._walked.add(sequence)
            for held in read_node(found).held:
                tensors = [held.value] if isinstance(held.value, Tensor) else self._unfold(held)
                self._reached += [RawSaved(sequence, number) for one in tensors for number in numbers_of(one)]

    def meet(self, node: Any, numbers_of: NumbersOf) -> None:
        """An operator of forward is given a tensor that a node has made: read that, and what is new behind it.

        What hooks have packed is left out: it is not held as it was saved.
        """
        pending = [node]
        while pending:
            node = pending.pop()
            sequence = sequence_of(node)
            if sequence in self._met or leaf_of(node) is not None:
                continue
            own = self._met[sequence] = []
            for held in read_node(node).held:
                if isinstance(held.value, Tensor):
                    own += numbers_of(held.value)
            pending += [following for following, _ in node.next_functions if following is not None]

    def list_saved(self) -> Iterator[RawSaved]:
        """What nodes have saved; nothing if there was no backward pass."""
        yield from self._reached
        for sequence, numbers in self._met.items() if self._walked else ():
            if sequence not in self._walked:
                yield from (RawSaved(sequence, number) for number in numbers)
