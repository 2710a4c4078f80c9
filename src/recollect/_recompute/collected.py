"""What user code changes in collections and objects while a region runs: forward has done so, and once is enough.

Recomputation runs the user's code again, and with it what puts things away: a module that appends its loss to a list, a
hook that records outputs, a function that keeps its state in a dict. What is computed would be there twice, and a
tensor keep its graph alive. And code that reads what it has put away must find what forward found.

So a collection or object that forward has changed is for recomputation as it was at entry, and holds afterwards what it
held before. Left alone are

* those that forward has not changed: whoever notes something in recomputation alone means to;
* whole numbers and texts in what functions name (closures, globals), because that is how people count calls. Those in
  attributes of modules follow the rule for numbers there (`module_state.py`);
* functions, modules and the like, which forward has set up for later calls.

So what they held lives until recomputation. The exception is a value of a dict or an object whose place another took,
if the code reads no such values: its last result. Of a long collection only the length is noted; it is shortened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, cast
from weakref import ref

from torch import Tensor, nn

from recollect._core.reachable import is_holder
from recollect._recompute.contents import (
    COLLECTIONS,
    Contents,
    add,
    can_be_rebuilt,
    contents_of,
    cut_off,
    is_data,
    is_same,
    is_settings,
    mapped,
    put,
    table_of,
    take,
    values_of,
    without_histories,
)

_MOST = 32  # collections that are looked into
_FEW = 64  # parts of one whose own parts are looked at
_DEEPEST = 4  # collections in each other
_LONG = 256  # of more parts only the number is noted: a list of losses grows as long as the training
_COUNTS = frozenset({int, bool, str, type(None)})
_PLAIN = _COUNTS | {float, Tensor, nn.Parameter}  # what a collection mostly holds

_busy: dict[int, tuple[int, _Entry]] = {}  # by id: collections that recomputation on some thread will put back


class Collected:
    """Collections around one execution of a region: noted at entry, `settle`d at exit, `put` for recomputation.

    Args:
        named: those that functions name.
        owned: those in attributes of modules.

    Attributes:
        was: after `settle`: by id, what those in attributes held at entry, but for those that hold settings. They
            themselves are not held: they may come to lead to the graph, and so to whoever holds this.
    """

    __slots__ = ("_count_owned", "_entries", "_held", "_parts", "was")

    def __init__(self, named: Iterable[Any], owned: Iterable[Any]) -> None:
        seen: set[int] = set()
        parts = self._parts = _find(owned, seen) if owned else []
        self._count_owned = len(parts)
        if named:
            parts += _find(named, seen)
        self._held = list(map(_read, parts))
        self._entries: list[_Entry] | None = None  # those that count; None while the function runs
        self.was: dict[int, Contents] = {}

    def settle(self, new: Iterable[Any], may_read: Callable[[Any, Any], bool]) -> bool:
        """At exit: keep those that forward has changed; whether there are any.

        Args:
            new: collections that stand where nothing stood at entry.
            may_read: whether the code that ran may read what a collection, or an object, had under a key or name.
        """
        parts, held = self._parts, self._held
        known = set(map(id, parts)) if new else ()
        changed = [
            number
            for number, (part, noted) in enumerate(zip(parts, held, strict=True))
            if type(noted) is int or not is_same(table_of(part), noted)
        ]
        entries = map(self._entry, changed)
        self._entries = [entry for entry in entries if entry.settle(may_read)]
        added = [part for part in new if id(part) not in known and table_of(part)]
        self._entries += [_Entry(part, 0, is_named=False) for part in added]
        self.was = {
            id(part): without_histories(noted)
            for part, noted in zip(parts[: self._count_owned], held, strict=False)
            if not isinstance(noted, int) and can_be_rebuilt(part) and not is_settings(noted)
        }
        self.was |= {id(part): type(contents_of(part))() for part in added if can_be_rebuilt(part)}
        for entry in self._entries:
            entry.let_go(self.was)
        self._parts = self._held = []
        return self._entries != []

    def _entry(self, number: int) -> _Entry:
        return _Entry(self._parts[number], self._held[number], is_named=number >= self._count_owned)

    def put(self, find_owned: Callable[[], Iterable[Any]]) -> list[Callable[[], None]]:
        """Before recomputation: set them as they were; gives what puts all back.

        Args:
            find_owned: gives those that are in attributes of modules now.
        """
        entries = list(map(self._entry, range(len(self._parts)))) if self._entries is None else self._entries
        is_complete = all(entry.is_held for entry in entries)
        owned = {} if is_complete else {id(part): part for part in _find(find_owned(), set())}
        found = [(entry, entry.find(owned)) for entry in entries]
        return [entry.put(part) for entry, part in found if part is not None]


def keep(owned: Iterable[Any]) -> list[Callable[[], None]]:
    """Before recomputation, which may stop between what puts in and what takes out again; gives what puts all back."""
    noted = [(part, contents_of(part)) for part in _find(owned, set()) if len(table_of(part)) <= _LONG]

    def put_back() -> None:
        for part, held in noted:
            if not is_same(table_of(part), held):
                put(part, held)

    return [put_back] if noted else []


def keep_out_of(named: Iterable[Any]) -> list[Callable[[], None]]:
    """Before recomputation, of collections that were not noted at entry; gives what takes its data out of them."""
    return [_Entry(part, _read(part), is_named=True).put(part, keeps_counts=True) for part in _find(named, set())]


def _read(part: Any) -> Contents | int:
    """What a collection or object holds; of a long one, how much."""
    kind = type(part)
    if (kind is list or kind is dict) and len(part) <= _LONG:
        return cast("Contents", part.copy())
    length = len(table_of(part))
    return contents_of(part) if length <= _LONG else length


class _Entry:
    """One collection or object, as it was at entry.

    Args:
        part: the collection itself.
        held: what it held then, or how much.
        is_named: whether functions name it.
    """

    __slots__ = ("_id", "_is_named", "_kind", "_length", "_noted", "_part", "_weak")

    def __init__(self, part: Any, held: Contents | int, *, is_named: bool) -> None:
        self._part, self._is_named, self._id, self._kind = part, is_named, id(part), type(part)
        self._weak: ref[Any] | None = None
        self._length = held if isinstance(held, int) else len(held)
        self._noted: Contents | None = None if isinstance(held, int) else held

    def settle(self, may_read: Callable[[Any, Any], bool]) -> bool:
        """It was changed, or is long: whether recomputation has to find it as it was."""
        part, before, self._noted = self._part, self._noted, None
        if before is None:
            return len(table_of(part)) > self._length and self._counts_for_much(_last(part, self._length))
        now = contents_of(part)
        if not self._counts_for_much(_others(now, before) + _others(before, now)):
            return False
        if _has_grown(now, before) or _loses_what_is_read(part, now, before, may_read):
            self._noted = mapped(cut_off, before)
        else:
            self._length = len(now)
        return True

    def let_go(self, was: dict[int, Contents]) -> None:
        """Do not hold the collection if it is one of these, nor an object in an attribute."""
        if self._id in was:
            self._part = None
        elif not (self._is_named or isinstance(self._part, COLLECTIONS)):
            try:
                self._weak, self._part = ref(self._part), None
            except TypeError:  # one with slots, but none for this
                return

    @property
    def is_held(self) -> bool:
        """Whether it is known which it is, without a look at what there is now."""
        return self._part is not None or self._weak is not None

    def find(self, owned: dict[int, Any]) -> Any:
        """The collection, held here or among these; None if nobody has it, and so nobody can ask for it."""
        if self._weak is not None:
            return self._weak()
        part = owned.get(self._id) if self._part is None else self._part
        return part if type(part) is self._kind else None

    def _counts_for_much(self, values: list[Any]) -> bool:
        return any(map(is_data, values)) or not (self._is_named or any(type(value) not in _COUNTS for value in values))

    def put(self, part: Any, *, keeps_counts: bool = False) -> Callable[[], None]:
        """Set the collection as it was; gives what puts it back, but for what counts calls, if asked to keep that.

        Does nothing if a recomputation on another thread is at it.
        """
        me = get_ident(), self
        owner = _busy.setdefault(id(part), me)
        if owner[0] != me[0]:
            return _do_nothing
        length = len(table_of(part))
        now = contents_of(part) if length <= _LONG else None
        hidden: Contents = []
        if self._noted is not None and not keeps_counts:
            put(part, self._noted)
        elif length > self._length:
            hidden = take(table_of(part), length - self._length)

        def put_back() -> None:
            if owner is me:
                del _busy[id(part)]
            if now is None:
                table = table_of(part)
                take(table, len(table) - self._length)
                add(table, hidden)
                return
            made = contents_of(part)
            if not is_same(made, now) and not (keeps_counts and not any(map(is_data, _others(made, now)))):
                put(part, now)

        return put_back


def _do_nothing() -> None:
    """What puts back what was left alone."""


def _others(held: Contents, other: Contents) -> list[Any]:
    """The values that one holds and the other does not."""
    known = set(map(id, values_of(other)))
    return [value for value in values_of(held) if id(value) not in known]


def _has_grown(now: Contents, before: Contents) -> bool:
    """Whether the last can be taken out so that the rest is as it was."""
    count = len(before)
    if len(now) <= count or isinstance(now, set) or isinstance(before, set):
        return False
    if isinstance(now, dict) and isinstance(before, dict):
        return is_same(dict(list(now.items())[:count]), before)
    return is_same(values_of(now)[:count], values_of(before))


def _loses_what_is_read(part: Any, now: Contents, before: Contents, may_read: Callable[[Any, Any], bool]) -> bool:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return may_read(part, None)
    return any(may_read(part, key) for key, value in before.items() if now.get(key) is not value)


def _find(parts: Iterable[Any], seen: set[int]) -> list[Any]:
    """These, and what collections and objects in them there are, those that stand deeper last."""
    found: list[Any] = []
    level = parts
    for depth in range(_DEEPEST + 1):
        inner: list[Any] = []
        for part in level:
            if id(part) in seen or len(seen) == _MOST:
                continue
            seen.add(id(part))
            found.append(part)
            if depth == _DEEPEST:
                continue
            table = table_of(part)
            if table and len(table) <= _FEW:
                values = table.values() if isinstance(table, dict) else table
                kinds = set(map(type, values)) - _PLAIN
                if kinds:
                    inner += [value for value in values if type(value) in kinds and is_holder(type(value))]
        level = inner
    return found


def _last(part: Any, length: int) -> list[Any]:
    """What a list or dict holds beyond a length; of others nobody knows the order."""
    if not isinstance(part, (list, dict, deque)):
        return []
    values = reversed(part.values() if isinstance(part, dict) else part)
    return [value for value, _ in zip(values, range(len(part) - length), strict=False)]
