"""What the calls of one region have shown, so that later ones need not ask again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect._recompute.module_tree import ModuleTree


class Memory:
    """Kept by a region, or by what stands for it.

    Attributes:
        tree: its modules; asked again only where it no longer holds.
        knowledge: what its calls under a policy have taught; of the room above, which checks that it still holds.
    """

    __slots__ = ("knowledge", "tree")

    def __init__(self) -> None:
        self.tree: ModuleTree | None = None
        self.knowledge: Any = None
