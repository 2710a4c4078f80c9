"""Attributes of modules that forward reads and others may set: flags such as ``training``, numbers, texts, tensors.

Noted are those of modules other than torch's own layers, of which only dropouts are likely to be changed, without the
tables in which a module keeps its parts. A number is noted by value, a tensor or collection by identity: one replaces
the other, as a table of positions does that is made anew for each length. So are values of other kinds that never
change, such as members of enumerations, and NumPy's numbers and arrays. Random generators are noted whatever their
names.

Nothing here compares tensors, or what is in collections, by ``==``: that would wait for the device, or run code of the
user's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain, islice
from operator import call, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.generators import generator_kinds
from recollect._core.reachable import is_holder
from recollect._core.reads import sets_twice
from recollect._recompute.contents import Former

Table = dict[str, Any]
"""A module's instance dictionary, or a table in it."""

Settings = Any
"""Values of a module's attributes: of one, the value itself, of several, a tuple."""

Place = tuple[int, str]
"""An attribute: the number of its module, and its name."""

TRAINING, FORWARD = "training", "forward"
_PLAIN = frozenset({bool, int, float, str, type(None)})
_CALLABLES = (FunctionType, BuiltinFunctionType, MethodType, partial, type)
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque)
_UNCHANGING = (complex, bytes, range, slice, Enum, torch.dtype, torch.device)
_SHORT = 16  # parts of a tuple or list that are compared, such as a shape
_TABLES = frozenset(vars(nn.Module())) - {TRAINING}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_plain(value: Any) -> bool:
    """Whether an attribute of this value is noted by value."""
    return type(value) in _PLAIN


def is_callable(value: Any) -> bool:
    """Whether an attribute of this value is a function, or a class: what a module computes with."""
    return isinstance(value, _CALLABLES)


def is_flag(value: Any) -> bool:
    """Whether an attribute of this value is a flag, a text or None, which may say what has been done."""
    return isinstance(value, bool | str | None)


def _name_settings(module: nn.Module) -> tuple[str, ...]:
    """The attributes that forward may read and its caller may set."""
    table = vars(module)
    own = type(module).__module__
    if own.startswith("torch.") and not isinstance(module, _DROPOUTS):
        return tuple(name for name in (TRAINING, FORWARD) if name in table)
    return tuple(name for name, value in table.items() if name not in _TABLES and _is_noted(value))


def _is_noted(value: Any) -> bool:
    kind = type(value)
    return (
        is_plain(value)
        or isinstance(value, (Tensor, *_COLLECTIONS, *_UNCHANGING))
        or is_callable(value)
        or kind.__module__ == "numpy"
        or (is_dataclass(kind) and kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    )


def is_equal(now: Any, noted: Any) -> bool:
    """Whether these are one, or equal numbers, flags or texts, or short tuples or lists of such."""
    if now is noted:
        return True
    kind = type(noted)
    if kind is Former:
        return bool(noted.is_of(now))
    if type(now) is not kind:
        return False
    if kind in _PLAIN:
        return bool(now == noted)
    if kind not in {tuple, list, torch.Size} or not len(now) == len(noted) <= _SHORT:
        return False
    return all(one is other or (type(one) in _PLAIN and one == other) for one, other in zip(now, noted, strict=True))


def _reader_of(names: tuple[str, ...]) -> Callable[[Table], Any]:
    return itemgetter(*names) if names else _read_nothing


def _read_nothing(_: Table) -> None:
    """Of a module without attributes to note."""


def _find_generators(tables: Iterable[Table]) -> list[Place]:
    """Random generators among attributes, whatever their names."""
    kinds = generator_kinds()
    return [
        (number, name)
        for number, table in enumerate(tables)
        if not kinds.isdisjoint(map(type, table.values()))
        for name, value in table.items()
        if type(value) in kinds
    ]


class Names:
    """Which attributes of some modules are noted. Holds no module, nor anything that leads to one.

    Args:
        modules: all of them.
        tables: their dictionaries.

    Attributes:
        by_module: the noted ones.
        back_and_forth: those that their modules set in several places, as one does with a flag while forward runs.
        by_identity: where something else than a number, text or function stands, or nothing: the number of the module,
            and the place in what its reader gives, None if it gives the value itself.
        readers: of each module, what reads them from its dictionary.
        sizes: how many attributes each has, of whatever kind.
        generators: those that are random generators.
        may_be_holders: those in which forward may collect something, and what is None.
        may_be_tensors: tensors, and what is None.
        unset: all that are None.
        carried: of those that forward has set: whether it may read what an earlier call has set there.
        takes_out: whether forward may take something out of collections; None where nobody has asked.
    """

    __slots__ = (
        *("back_and_forth", "by_identity", "by_module", "generators", "may_be_holders", "may_be_tensors", "readers"),
        *("carried", "sizes", "takes_out", "unset"),
    )

    def __init__(self, modules: list[nn.Module], tables: list[Table]) -> None:
        self.by_module = list(map(_name_settings, modules))
        self.readers = list(map(_reader_of, self.by_module))
        self.sizes = list(map(len, tables))
        self.by_identity: dict[tuple[int, int | None], None] = {}
        self.add_others(tables)
        set_twice = {kind: sets_twice(kind) for kind in set(map(type, modules))}
        self.back_and_forth = [
            (number, name)
            for number, (module, names) in enumerate(zip(modules, self.by_module, strict=True))
            for name in set_twice[type(module)].intersection(names)
        ]
        self.generators = _find_generators(tables)
        self.unset = {(number, name) for number, table in enumerate(tables) for name in table if table[name] is None}
        self.carried: dict[Place, bool] = {}
        self.takes_out: bool | None = None
        self.may_be_tensors: list[Place] = []
        self.may_be_holders: list[Place] = []
        for number, (table, names) in enumerate(zip(tables, self.by_module, strict=True)):
            if len(names) > 1 or (names and TRAINING not in names):
                own = [(name, value) for name, value in table.items() if name not in _TABLES]
                self.may_be_holders += [
                    (number, name) for name, value in own if value is None or is_holder(type(value))
                ]
                self.may_be_tensors += [
                    (number, name) for name, value in own if value is None or isinstance(value, Tensor)
                ]

    def add_others(self, tables: list[Table]) -> None:
        """Add to `by_identity` what stands there now."""
        for number, (table, names) in enumerate(zip(tables, self.by_module, strict=True)):
            for at, name in enumerate(names):
                value = table.get(name)
                if value is None or not (is_plain(value) or is_callable(value)):
                    self.by_identity[number, at if len(names) > 1 else None] = None


class ModuleAttributes:
    """The attributes of some modules: what they are now, at each call.

    Does not hold the roots, nor their dictionaries, so that they may hold it: their callers give them.

    Args:
        names: which are noted.
        inner: the dictionaries of all modules but the roots.
        is_new: whether no call has ended since the names were found.
    """

    __slots__ = ("_inner", "is_new", "names")

    def __init__(self, names: Names, inner: list[Table], *, is_new: bool) -> None:
        self.names, self._inner, self.is_new = names, inner, is_new

    def read(self, roots: list[nn.Module]) -> list[Settings] | None:
        """The noted attributes of each module, as they are now; None if a module has got or lost one of any kind."""
        tables = self._tables(roots)
        if list(map(len, tables)) != self.names.sizes:
            return None
        try:
            return list(map(call, self.names.readers, tables))
        except KeyError:
            return None

    def are(self, roots: list[nn.Module], noted: list[Settings]) -> bool:
        """Whether they are as `read` gave them."""
        now = self.read(roots)
        if now is None:
            return False
        for number, at in self.names.by_identity:
            one, other = now[number], noted[number]
            if at is not None:
                one, other = one[at], other[at]
            if one is not other and not (type(other) is Former and other.is_of(one)):
                return all(map(is_equal, self._in_turn(now), self._in_turn(noted)))
        try:
            return bool(now == noted)
        except Exception:  # something else stands where a number stood, and cannot be compared
            return False

    def _in_turn(self, settings: list[Settings]) -> Iterator[Any]:
        """What `read` gave, one after the other."""
        names = self.names.by_module
        return chain.from_iterable(
            values if len(names[number]) > 1 else (values,) for number, values in enumerate(settings)
        )

    def replaced(self, settings: list[Settings], values: dict[Place, Any]) -> list[Settings]:
        """What `read` gave, with other values in some places."""
        others = list(settings)
        for number in {number for number, _ in values}:
            names = self.names.by_module[number]
            noted = settings[number] if len(names) > 1 else (settings[number],)
            now = [values.get((number, name), value) for name, value in zip(names, noted, strict=True)]
            others[number] = tuple(now) if len(names) > 1 else now[0]
        return others

    def find_noted(self, settings: list[Settings]) -> list[tuple[Place, Any]]:
        """What `read` gave where something else than a number, text or function stood."""
        names = self.names.by_module
        return [
            ((number, names[number][at or 0]), settings[number] if at is None else settings[number][at])
            for number, at in self.names.by_identity
        ]

    def find_own_generators(self, roots: list[nn.Module]) -> list[Any]:
        """What is there now where the modules had random generators."""
        tables = self._tables(roots)
        return [tables[number].get(name) for number, name in self.names.generators]

    def find_holders(self, roots: list[nn.Module]) -> list[Any]:
        """Collections, and objects of the user's own classes, where the modules had some, or nothing."""
        return self._holders_at(roots, self.names.may_be_holders)

    def find_new_holders(self, roots: list[nn.Module]) -> list[Any]:
        """The same where they had nothing when the names were found."""
        return self._holders_at(roots, [place for place in self.names.may_be_holders if place in self.names.unset])

    def _holders_at(self, roots: list[nn.Module], places: list[Place]) -> list[Any]:
        if not places:
            return []
        tables = self._tables(roots)
        found = [tables[number].get(name) for number, name in places]
        return [value for value in found if value is not None and is_holder(type(value))]

    def find_new_generators(self, roots: list[nn.Module]) -> list[tuple[Table, str, bool]]:
        """After the first call: random generators that it has made, and whether there was None before, or nothing.

        If it made any, the names no longer hold: the next call finds others.
        """
        self.is_new = False
        tables, known = self._tables(roots), self.names.generators
        self.names.add_others(tables)
        found = [place for place in _find_generators(tables) if place not in known]
        if found:
            self.names.sizes = []
        return [(tables[place[0]], place[1], place in self.names.unset) for place in found]

    def find_back_and_forth(self, roots: list[nn.Module]) -> list[tuple[Table, str]]:
        """Attributes that the modules may set and set back while forward runs."""
        if not self.names.back_and_forth:
            return []
        tables = self._tables(roots)
        return [(tables[number], name) for number, name in self.names.back_and_forth]

    def find_made(self, roots: list[nn.Module]) -> list[tuple[Table, str]]:
        """Attributes that were made since this was: what is added stands behind."""
        grown = [
            (table, size)
            for table, size in zip(self._tables(roots), self.names.sizes, strict=False)
            if len(table) > size
        ]
        return [(table, name) for table, size in grown for name in islice(table, size, None)]

    def by_name(self, settings: list[Settings]) -> Iterator[Table]:
        """What `read` gave, of each module by name."""
        for names, values in zip(self.names.by_module, settings, strict=True):
            yield dict(zip(names, values, strict=True)) if len(names) > 1 else dict.fromkeys(names, values)

    def _tables(self, roots: list[nn.Module]) -> list[Table]:
        return [*map(vars, roots), *self._inner]
