"""What user code collects while a region runs: forward has collected it, and once is enough.

Recomputation runs the user's code again, and with it what puts things away: a module that appends its loss to a list, a
hook that records outputs. What is computed would be there twice, and a tensor keep its graph alive. And code that reads
what it has collected (``torch.cat(self.features)``) must find what forward found.

So a collection in which forward has put something is for recomputation as long as it was at entry, and holds afterwards
what it held before. Left alone are

* collections in which forward has put nothing: whoever notes something in recomputation alone means to;
* whole numbers and texts in collections that functions name (closures, globals), because that is how people count
  calls. Those in attributes of modules follow the rule for numbers there (`module_state.py`);
* functions, modules and the like, which forward has set up for later calls.

Lists and dicts that have grown can be shortened. A dict in which a value took another's place, or a full queue, is for
recomputation as it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from threading import get_ident
from typing import Any

from recollect._core.reachable import is_holder
from recollect._recompute.contents import COLLECTIONS, contents_of, is_data, is_same, put, size_of, values_of

_MOST = 128  # collections that are looked into, and parts of one whose own parts are looked at
_DEEPEST = 2  # collections in each other
_LONG = 512  # of more parts only the number is noted: a list of losses grows as long as the training

_busy: dict[int, tuple[int, _Entry]] = {}  # by id: collections that recomputation on some thread will put back


class Collected:
    """Collections around one execution of a region: noted at entry, `settle`d at exit, `put` for recomputation.

    Args:
        named: those that functions name; whole numbers and texts that recomputation puts there stay.
        owned: those in attributes of modules.
    """

    __slots__ = ("_entries",)

    def __init__(self, named: Iterable[Any], owned: Iterable[Any]) -> None:
        seen: set[int] = set()
        self._entries = [_Entry(part, is_named=False) for part in _walk(owned, seen)]
        self._entries += [_Entry(part, is_named=True) for part in _walk(named, seen)]

    def settle(self, new: Iterable[Any] = ()) -> Collected | None:
        """At exit: keep those in which forward has put something; None if there are none.

        Args:
            new: collections that stand where nothing stood at entry.
        """
        entries = [entry for entry in self._entries if entry.has_changed()]
        known = {id(entry.part) for entry in self._entries}
        entries += [_Entry(part, is_named=False, length=0) for part in new if id(part) not in known and size_of(part)]
        self._entries = entries
        return self if entries else None

    def put(self) -> list[Callable[[], None]]:
        """Before recomputation: shorten them to what they held; gives what puts all back."""
        return [entry.put(shortens=True) for entry in self._entries]


def keep_out_of(named: Iterable[Any]) -> list[Callable[[], None]]:
    """Before recomputation, of collections that were not noted at entry; gives what takes its data out of them."""
    return [_Entry(part, is_named=True).put(shortens=False) for part in _walk(named, set())]


class _Entry:
    """One collection or object, as it was at entry.

    Attributes:
        part: the collection itself.
    """

    __slots__ = ("_is_named", "_length", "_noted", "part")

    def __init__(self, part: Any, *, is_named: bool, length: int | None = None) -> None:
        self.part, self._is_named = part, is_named
        self._length = size_of(part) if length is None else length
        self._noted = _ids_of(part)

    def has_changed(self) -> bool:
        """Whether it holds other things, or more."""
        return size_of(self.part) != self._length or _ids_of(self.part) != self._noted

    def put(self, *, shortens: bool) -> Callable[[], None]:
        """Take out what forward has put in, if asked to; gives what puts it back, and takes out recomputation's.

        Does nothing if a recomputation on another thread is at it.
        """
        part, me = self.part, (get_ident(), self)
        owner = _busy.setdefault(id(part), me)
        if owner[0] != me[0]:
            return _do_nothing
        held = contents_of(part) if size_of(part) <= _LONG else None
        grown = _last(part, self._length) if shortens else []
        hidden = _take(part, self._length) if any(map(is_data, grown)) else []
        length = size_of(part)

        def put_back() -> None:
            if owner is me:
                del _busy[id(part)]
            if self._is_named and not any(map(is_data, _added(part, length, held))):
                if hidden:
                    _extend(part, [*hidden, *_take(part, length)])
            elif held is None:
                _take(part, length)
                _extend(part, hidden)
            elif not is_same(contents_of(part), held):
                put(part, held)

        return put_back


def _do_nothing() -> None:
    """What puts back what was left alone."""


def _ids_of(part: Any) -> list[int] | None:
    """Which things it holds; None if they are many."""
    if size_of(part) > _LONG:
        return None
    table = part if isinstance(part, COLLECTIONS) else vars(part)
    return list(map(id, table.values() if isinstance(table, dict) else table))


def _walk(parts: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """These, and what collections and objects in them there are."""
    waiting = deque((part, 0) for part in parts)
    while waiting and len(seen) < _MOST:
        part, depth = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if depth < _DEEPEST and size_of(part) <= _MOST:
            table = part if isinstance(part, COLLECTIONS) else vars(part)
            values = list(table.values() if isinstance(table, dict) else table)
            kinds = {kind for kind in set(map(type, values)) if is_holder(kind)}
            if kinds:
                waiting.extend((value, depth + 1) for value in values if type(value) in kinds)


def _added(part: Any, length: int, held: Any) -> list[Any]:
    """What recomputation has put in."""
    if held is None:
        return _last(part, length)
    known = set(map(id, values_of(held)))
    return [value for value in values_of(contents_of(part)) if id(value) not in known]


def _last(part: Any, length: int) -> list[Any]:
    """What a list or dict holds beyond a length; of others nobody knows the order."""
    if not isinstance(part, (list, dict, deque)):
        return []
    values = reversed(part.values() if isinstance(part, dict) else part)
    return list(islice(values, max(len(part) - length, 0)))


def _take(part: Any, length: int) -> list[Any]:
    """Take the last out of a list or dict until it is so long; gives these in their order."""
    take = part.popitem if isinstance(part, dict) else part.pop if isinstance(part, (list, deque)) else None
    count = len(part) - length if take is not None else 0
    return [take() for _ in range(count)][::-1] if take is not None else []


def _extend(part: Any, values: list[Any]) -> None:
    if values:
        (part.extend if isinstance(part, (list, deque)) else part.update)(values)
