"""What a collection or an object holds, one level deep: noted, compared and put back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from recollect._core.reachable import slots_of
from recollect._core.torch_private.functorch import transforms_active

COLLECTIONS = (dict, list, set, deque)
"""What user code may collect something in."""

_SIMPLE = frozenset({dict, list, set})
_REBUILT = _SIMPLE | {deque, OrderedDict, defaultdict}
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_WITHOUT_HISTORY = _SIMPLE | _PLAIN | {nn.Parameter}
_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes, slice, range})
_CODE = (nn.Module, type, ModuleType, FunctionType, MethodType)

Contents = dict[Any, Any] | list[Any] | set[Any]


def contents_of(part: Any) -> Contents:
    """A copy of what a collection holds, or an object among its attributes."""
    if isinstance(part, dict):
        return dict(part)
    if isinstance(part, (list, deque)):
        return list(part)
    return set(part) if isinstance(part, set) else dict(table_of(part))


def table_of(part: Any) -> Any:
    """The collection itself, or the attributes of an object: its dictionary, or a copy of what is in its slots."""
    if isinstance(part, COLLECTIONS):
        return part
    table = getattr(part, "__dict__", None)
    names = slots_of(type(part))
    if not names:
        return {} if table is None else table
    return {name: getattr(part, name) for name in names if hasattr(part, name)} | (table or {})


def values_of(held: Contents) -> list[Any]:
    """The values among them."""
    return list(held.values() if isinstance(held, dict) else held)


def is_same(one: Any, other: Any) -> bool:
    """Whether a collection, or what another held, has the same objects in the same places; in loops that run in C."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return all(map(is_, one.values(), other.values())) and all(map(is_, one, other))
    if isinstance(one, set) or isinstance(other, set):
        return isinstance(one, set) and isinstance(other, set) and set(map(id, one)) == set(map(id, other))
    return all(map(is_, one, other))


def put(part: Any, held: Contents) -> None:
    """Let a collection or an object hold these, and nothing else."""
    names = () if isinstance(part, COLLECTIONS) else slots_of(type(part))
    if names:
        _put_in_slots(part, names, held)
        return
    table = table_of(part)
    _builtin_of(table).clear(table)
    add(table, held)


def _put_in_slots(part: Any, names: Iterable[str], held: Any) -> None:
    for name in names:
        if name in held:
            object.__setattr__(part, name, held[name])
        elif hasattr(part, name):
            object.__delattr__(part, name)
    table = getattr(part, "__dict__", None)
    if table is not None:
        table.clear()
        table.update({name: value for name, value in held.items() if name not in names})


def add(table: Any, held: Contents) -> None:
    """Add these to a collection, in their order."""
    kind = _builtin_of(table)
    if isinstance(held, dict):
        for key, value in held.items():
            kind.__setitem__(table, key, value)
    elif kind is set:
        set.update(table, held)
    else:
        kind.extend(table, held)


def take(table: Any, count: int) -> Contents:
    """Take so many out of a collection, from its end; gives them in their order."""
    kind = _builtin_of(table)
    taken = [(kind.popitem if issubclass(kind, dict) else kind.pop)(table) for _ in range(count)][::-1]
    return dict(taken) if issubclass(kind, dict) else taken


def _builtin_of(table: Any) -> Any:
    """Whose methods change a collection: not those of a class of the user's, which may do more, or refuse."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(table, kind))


def mapped(fn: Callable[[Any], Any], held: Contents) -> Contents:
    """The same with other values."""
    if isinstance(held, dict):
        return {key: fn(value) for key, value in held.items()}
    return type(held)(map(fn, held))


def cut_off(value: Any) -> Any:
    """A tensor without its history; anything else as it is."""
    return alias_of(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def alias_of(tensor: Tensor) -> Tensor:
    """The same values without their history, with the same flag; under a transform, which allows no flags, without."""
    alias = tensor.detach()
    return alias.requires_grad_() if tensor.requires_grad and not transforms_active() else alias


def copy_collections(value: Any, depth: int = 4) -> Any:
    """A collection with copies of the collections in it, tensors in it cut off from their graph; others as they are."""
    if not depth or not isinstance(value, COLLECTIONS):
        return value
    other: Any = value.copy()
    if isinstance(value, dict):
        for key, part in value.items():
            if type(part) not in _UNCHANGING:
                other[key] = copy_collections(cut_off(part), depth - 1)
    elif not _UNCHANGING.issuperset(map(type, value)):
        parts = [copy_collections(cut_off(part), depth - 1) for part in value]
        other.clear()
        (other.update if isinstance(other, set) else other.extend)(parts)
    return other


def cut_off_all(value: Any) -> Any:
    """A tensor, or tensors in tuples and collections, without their history; containers are copied."""
    if isinstance(value, tuple):
        make = tuple if type(value) is tuple else getattr(value, "_make", None)  # a named one, or of its own kind
        return value if make is None else make(map(cut_off_all, value))
    return copy_collections(cut_off(value))


def is_data(value: Any, depth: int = 3) -> bool:
    """Whether this was computed: a tensor, an array, a fraction, or a container or object that leads to one.

    Other numbers, and texts, are not: they count calls, and name them.
    """
    if isinstance(value, (Tensor, float, complex)) or type(value).__module__ == "numpy":
        return True
    if not depth or isinstance(value, _CODE):
        return False
    if isinstance(value, (tuple, *COLLECTIONS)):
        parts = list(value.values() if isinstance(value, dict) else value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return any(is_data(part, depth - 1) for part in parts)


def is_settings(held: Contents) -> bool:
    """Whether these are numbers and texts, and at least one: nobody puts results beside them."""
    return bool(held) and _PLAIN.issuperset(map(type, held.values() if isinstance(held, dict) else held))


def without_histories(held: Contents) -> Contents:
    """The same, tensors in it and in its tuples cut off from their graph."""
    if _WITHOUT_HISTORY.issuperset(map(type, held.values() if isinstance(held, dict) else held)):
        return held
    return mapped(lambda value: cut_off_all(value) if isinstance(value, tuple) else cut_off(value), held)


class Former:
    """A collection in an attribute, as it was at entry.

    It does not hold the collection, which may come to lead to the graph, and so to whoever holds this.

    Args:
        part: the collection.
        was: what the collections in attributes held at entry, this one among them, by their ids.
    """

    __slots__ = ("_empty", "_id", "_kind", "_was")

    def __init__(self, part: Any, was: dict[int, Contents]) -> None:
        self._id, self._kind, self._was, self._empty = id(part), type(part), was, None
        if self._kind not in _SIMPLE:  # one with a length, or a default
            self._empty = part.copy()
            self._empty.clear()

    def __eq__(self, other: object) -> bool:
        """Tuples of attributes compare their parts in C, and ask this."""
        return self.is_of(other)

    __hash__ = None  # type: ignore[assignment]

    def is_of(self, value: Any) -> bool:
        """Whether this is that collection, or one in its place, which serves as well."""
        return id(value) == self._id and type(value) is self._kind

    def make(self) -> Any:
        """Another one, as that was."""
        other = self._kind() if self._empty is None else self._empty.copy()
        put(other, mapped(lambda value: _rebuilt(value, self._was), self._was[self._id]))
        return other


def can_be_rebuilt(part: Any) -> bool:
    """Whether another collection of its kind may stand for this one: not for a user's class."""
    return type(part) in _REBUILT


def _rebuilt(part: Any, was: dict[int, Contents]) -> Any:
    """Of a collection that is among these, another one, as it was; anything else as it is."""
    return Former(part, was).make() if type(part) in _REBUILT and id(part) in was else part
