"""What the calls of one region have shown, so that later ones need not ask again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect._recompute.module_tree import ModuleTree

FOUND = "found"
"""Stands among kinds of generator for those that a region is found to draw from."""

_LOOKS = 3
_OTHERS = frozenset({"python", "numpy"})
_AT_FIRST = frozenset({"torch", FOUND, *_OTHERS})
_NONE: frozenset[str] = frozenset()  # Dynamo does not trace frozenset[str]()


class Memory:
    """Kept by a region, or by what stands for it.

    Attributes:
        tree: its modules; asked again only where it no longer holds.
        knowledge: what its calls under a policy have taught; of the room above, which checks that it still holds.
        preserved: the kinds of generator to read at a call where it may find them: Python's and NumPy's only at the
            first calls, because to read them takes 100 µs, and later if one of those moved them.
        looks: how many of the first calls are still to come.
    """

    __slots__ = ("_moved", "knowledge", "looks", "preserved", "tree")

    def __init__(self) -> None:
        self.tree: ModuleTree | None = None
        self.knowledge: Any = None
        self.looks, self.preserved, self._moved = _LOOKS, _AT_FIRST, _NONE

    def note_moved(self, kinds: frozenset[str]) -> None:
        """One of the first calls is over, which moved generators of these kinds."""
        self.looks -= 1
        self._moved |= kinds & _OTHERS
        if not self.looks:
            self.preserved = self._moved | {"torch", FOUND}
