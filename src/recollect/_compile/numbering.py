"""Which call of its operator a node of a graph is.

A policy that keeps every second product knows values by the numbers of calls, and so do plans. A compiler takes
operators apart: what one was taken apart into is one call. It also tries to take apart what it then leaves whole, and
the pieces of the attempt stay in the graph while it is traced, although nobody reads them. Before each product in
bfloat16 Inductor leaves two casts. They count for nothing.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from recollect._core.operators import operator_of
from recollect._core.torch_private.ops import canonical


def original_of(node: Node) -> Any:
    """The operator that the user's code called, of which a node may be a piece."""
    return canonical(node.meta.get("original_aten") or node.target)


class Numbering:
    """Counts calls. Nodes are numbered in the order of the graph, each once.

    Args:
        nodes: all of them, in order.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._given_up = _find_given_up(nodes)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last: tuple[Any, ...] = ()
        self._is_whole = False
        self._outputs = 0

    def is_given_up(self, node: Node) -> bool:
        """Whether a node is left of an attempt to take its operator apart: nobody will read it."""
        return node in self._given_up

    def number(self, node: Node, region: str, outputs: int) -> tuple[int, int]:
        """The number of a node's call in its region, and that of its first output among those of the whole call."""
        mark, is_whole = _mark(node), _is_whole(node)
        if mark != self._last or (is_whole and self._is_whole):
            self._counts[region, mark[0]] += 1
            self._is_whole, self._outputs = False, 0
        first = self._outputs
        self._last, self._outputs = mark, first + outputs
        self._is_whole |= is_whole
        return self._counts[region, mark[0]] - 1, first


def _find_given_up(nodes: Sequence[Node]) -> frozenset[Node]:
    whole: set[tuple[Any, ...]] = set()
    found: set[Node] = set()
    for node in reversed(nodes):
        if _is_whole(node):
            whole.add(_mark(node))
        elif node.target is not operator.getitem and found.issuperset(node.users) and _mark(node) in whole:
            found.add(node)
    return frozenset(found)


def _is_whole(node: Node) -> bool:
    return operator_of(original_of(node)).name == operator_of(node.target).name


def _mark(node: Node) -> tuple[Any, ...]:
    """What the pieces of one call share."""
    return operator_of(original_of(node)).name, node.meta.get("seq_nr"), node.meta.get("stack_trace")
