"""Whether a backward pass reaches all that a region has saved: it does if it comes through each of its outputs.

With one differentiable output, the first saved tensor that is asked for shows it. With several, each output's node
reports when a pass runs it. An argument that is passed on comes from outside, and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakMethod, ref

from torch import Tensor

from recollect._core.torch_private.engine import current_pass
from recollect._core.torch_private.pytree import is_container, tree_leaves

if TYPE_CHECKING:
    from recollect._recompute.inputs import Inputs


def find_nodes(result: Any, inputs: Inputs) -> set[Any]:
    """The nodes of a result's differentiable outputs."""
    nodes: set[Any] = set()
    for leaf in leaves_of(result):
        if isinstance(leaf, Tensor):
            node = leaf.grad_fn
            if node is not None and not inputs.has_given(leaf):
                nodes.add(node)
    return nodes


def leaves_of(result: Any) -> Iterable[Any]:
    """What a function gave, if that is a collection."""
    kind = type(result)
    if kind is tuple and not any(map(is_container, map(type, result))):
        return cast("tuple[Any, ...]", result)  # what blocks of models give; apart, because a walk takes 5 µs
    return tree_leaves(result) if is_container(kind) else ()


class Outputs:
    """The outputs of a region that has several, and those that the running pass has reached.

    Args:
        nodes: theirs.
        reached: a method called after a pass has come to another one; held weakly.
    """

    __slots__ = ("__weakref__", "_pass", "_reached", "_reports", "_seen")

    def __init__(self, nodes: set[Any], reached: Callable[[], None]) -> None:
        self._reached = WeakMethod(reached)
        self._reports: list[ref[Any]] = []  # each goes with its node
        self._pass, self._seen = -1, set[int]()
        for index, node in enumerate(nodes):
            report = _Report(WeakMethod(self.note), index)
            self._reports.append(ref(report))
            node.register_prehook(report)

    def note(self, index: int) -> None:
        """A pass has come to this output."""
        pass_id = current_pass()
        if self._pass != pass_id:
            self._pass, self._seen = pass_id, set()
        self._seen.add(index)
        reached = self._reached()
        if reached is not None:
            reached()

    def are_reached(self) -> bool:
        """Whether the running pass came to all of them. One that nobody used is gone with its node, and its report."""
        return (
            bool(self._seen)
            and self._pass == current_pass()
            and all(index in self._seen or report() is None for index, report in enumerate(self._reports))
        )


class _Report:
    """Hook of one of several outputs; holds the others weakly."""

    __slots__ = ("__weakref__", "_index", "_note")

    def __init__(self, note: WeakMethod[Any], index: int) -> None:
        self._note, self._index = note, index

    def __call__(self, _gradients: Any) -> None:
        note = self._note()
        if note is not None:
            note(self._index)
