"""Attributes of a region's modules: recomputation finds what forward found, and afterwards they are as they were.

What others have set since forward goes back in any case. Of what forward sets itself

* numbers, flags and texts go back, but for flags of what a first forward has set up, such as hooks and parts: nobody
  undoes that, and it must not be set up again;
* tensors and collections go back if the module carries them from call to call, that is, if its code reads them before
  it sets them; others it only shows (its last result), and to hold what they replaced would take memory;
* what it has made goes, if it is a number, flag, text or random generator.

What forward sets and sets back while it runs (a flag, a depth) is afterwards as it was before recomputation, which may
have been stopped in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from recollect._core.torch_private.sharding import is_managed
from recollect._recompute.contents import Contents, Former, cut_off_all
from recollect._recompute.module_attributes import (
    FORWARD,
    TRAINING,
    Place,
    Table,
    is_callable,
    is_equal,
    is_flag,
    is_plain,
)
from recollect._recompute.module_attributes import Settings as Values
from recollect._recompute.module_tree import ModuleTree

_ABSENT = object()


def _is_of_engine(table: Table, value: Any) -> bool:
    """Whether a sharding engine swaps this: a view of what it has gathered, in place of a parameter."""
    return isinstance(value, Tensor) and is_managed(table)


class ModuleSettings:
    """Attributes of modules around one execution of a region: noted at entry, `settle`d at exit, `put` meanwhile.

    Args:
        tree: the modules, but for the roots.
        roots: the outermost.
        values: what the tree's attributes read at entry.
        restores: whether what forward itself sets goes back even where it sets no other state.

    Attributes:
        are_set_here: after `settle`: whether forward has set any.
    """

    __slots__ = ("_made", "_new", "_own", "_restores", "_roots", "_set_here", "_tree", "_values", "are_set_here")

    def __init__(self, tree: ModuleTree, roots: list[nn.Module], values: list[Values], *, restores: bool) -> None:
        self._tree, self._roots, self._values, self._restores = tree, roots, values, restores
        self._own: set[Place] | None = None  # those that forward sets and that stand as they are; None while it runs
        self._set_here: list[tuple[Table, str]] = []  # those that recomputation sets again
        self._made: list[tuple[Table, str]] = []
        self._new: list[tuple[Table, str, bool]] = []  # what recomputation makes again, and whether it was None before

    def _changed(self) -> Iterator[tuple[Table, str, Any]]:
        """Attributes that are not as they were at entry: where each stands, its name, and its value then."""
        tree, own = self._tree, self._own or ()
        for number, (module, noted) in enumerate(
            zip(tree.modules(self._roots), tree.attributes.by_name(self._values), strict=True)
        ):
            table = vars(module)
            for name, value in noted.items():
                now = table.get(name, _ABSENT)
                if now is not value and (number, name) not in own and not is_equal(now, value):
                    yield table, name, value

    def settle(self, *, has_state: Callable[[], bool], find_set_up: Callable[[], set[int]]) -> None:
        """At exit: see what forward has set and made.

        Args:
            has_state: tells whether it has set other state, too; flags go with that.
            find_set_up: gives the numbers of modules whose flags may say what it has set up.
        """
        attributes = self._tree.attributes
        if attributes.is_new:
            self._new = attributes.find_new_generators(self._roots)
        self._own = set()
        self.are_set_here = not attributes.are(self._roots, self._values)
        if not self.are_set_here:
            return
        restores = self._restores or has_state()
        numbers = {id(vars(module)): number for number, module in enumerate(self._tree.modules(self._roots))}
        set_here = [(*place, value) for *place, value in self._changed() if place[1] != TRAINING]
        made = attributes.find_made(self._roots) if restores else []
        flags = [value for _, _, value in set_here] + [table[name] for table, name in made]
        done = find_set_up() if restores and any(map(is_flag, flags)) else set()

        def goes_back(table: Table, value: Any) -> bool:
            return restores and is_plain(value) and not (is_flag(value) and numbers[id(table)] in done)

        self._new += [(table, name, False) for table, name in made if goes_back(table, table[name])]
        others = {(numbers[id(table)], name): value for table, name, value in set_here if not goes_back(table, value)}
        carried = {place: cut_off_all(value) for place, value in others.items() if self._is_carried(place, value)}
        self._own = others.keys() - carried.keys()
        if self._restores:
            self._set_here = [(table, name) for table, name, _ in set_here if not _is_of_engine(table, table.get(name))]
            kept = [(table, name) for table, name in made if not is_plain(table[name])]
            self._made = [(table, name) for table, name in kept if not _is_of_engine(table, table[name])]
        # What else it has replaced, such as its last result, lives no longer than without us.
        self._values = attributes.replaced(self._values, carried | dict.fromkeys(self._own, None))

    def _is_carried(self, place: Place, value: Any) -> bool:
        module = self._tree.modules(self._roots)[place[0]]
        if not self._restores or is_plain(value) or _is_of_engine(vars(module), value):
            return False
        return self._tree.carries(self._roots, place)

    def let_go(self, was: dict[int, Contents]) -> None:
        """After `settle`: do not hold these collections; given is what they held at entry, by their ids."""
        attributes = self._tree.attributes
        noted = attributes.find_noted(self._values)
        self._values = attributes.replaced(
            self._values, {place: Former(value, was) for place, value in noted if id(value) in was}
        )

    def have_changed(self) -> bool:
        """Whether `put` has anything to do."""
        return bool(self._new or self._set_here) or not self._tree.attributes.are(self._roots, self._values)

    def keep(self) -> ExitStack | None:
        """Where `put` has nothing to do: gives what puts back those that recomputation may leave as it set them."""
        found = self._tree.attributes.find_back_and_forth(self._roots) if self._restores else []
        if not found:
            return None
        stack = ExitStack()
        for table, name in found:
            stack.callback(_put_back, table, name, table.get(name, _ABSENT))
        return stack

    def put(self, stack: ExitStack) -> None:
        """Before recomputation: set them as forward found them; the stack puts back what stands there now."""
        kept = self.keep()
        if kept is not None:
            stack.enter_context(kept)
        # First, so that it comes last: what recomputation sets there goes again.
        for table, name in (*self._set_here, *self._made):
            stack.callback(_put_back, table, name, table.get(name, _ABSENT))
        for table, name, value in self._changed():
            # While forward runs (a backward inside it), nobody knows which of the others are its own.
            if self._own is not None or name == TRAINING:
                stack.callback(_put_back, table, name, table.get(name, _ABSENT))
                table[name] = value.make() if type(value) is Former else value
        for table, name, was_none in self._new:
            if name in table:
                stack.callback(table.__setitem__, name, table.pop(name))
                if was_none:
                    table[name] = None
        if self._restores and self._own is not None:
            self._take_out_forwards(stack)

    def _take_out_forwards(self, stack: ExitStack) -> None:
        """What somebody has put over a module's ``forward`` since."""
        for table, name in self._tree.attributes.find_made(self._roots):
            if name == FORWARD and is_callable(table[name]) and not any(table is at for at, _ in self._made):
                stack.callback(table.__setitem__, name, table.pop(name))


def _put_back(table: Table, name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value
