"""Functions that call each other by global names: which they are is found once, then only compared.

Code in the style of functions reaches dozens of others at every call, and to look into each takes longer than to
recompute a small region.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from itertools import chain
from logging import Logger
from operator import call, is_, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

FIXED = frozenset({type, ModuleType, BuiltinFunctionType, Logger, torch.dtype})
"""Kinds of values that are code, or name something once and for all."""

INERT = FIXED | {type(None), str, bytes, int, float, bool}
"""Kinds of values that lead to nothing."""

_NOT_SEARCHED = ("torch.", "recollect.")
_MOST = 128  # functions of a group
_UNKNOWN: Any = object()

Names = dict[str, Any]
Read = Callable[[Names], tuple[Any, ...]]


def are_of_library(names: Names) -> bool:
    """Whether these are the globals of a module of torch's or ours, whose functions are not looked into."""
    return (names.get("__name__") or "").startswith(_NOT_SEARCHED)


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Global names that a function's code reads, functions within it included."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return tuple(dict.fromkeys(chain(own, *map(globals_of, inner))))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """All names in a function's code, of globals and of attributes, functions within it included."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


class Group:
    """A function and those that it reaches by global names, through such functions alone. Holds none of them.

    Args:
        functions: all of them, the first among them.
    """

    __slots__ = ("_functions", "_parts")

    def __init__(self, functions: list[FunctionType]) -> None:
        self._functions = list(map(ref, functions))
        members = set(map(id, functions))
        by_table: dict[int, list[FunctionType]] = {}
        for function in functions:
            by_table.setdefault(id(function.__globals__), []).append(function)
        self._parts = [_Part(group, members) for group in by_table.values()]

    def read(self) -> Reached | None:
        """The functions, and what other global names they read, by module; None if they are others by now."""
        functions: list[Any] = list(map(call, self._functions))
        if None in functions:
            return None
        found = []
        for part in self._parts:
            table = part.read()
            if table is None:
                return None
            found.append((table, part.others))
        return functions, found


class _Part:
    """The functions of a group that were written in one module.

    Attributes:
        others: the names that lead to other things than functions of the group, and code.
    """

    __slots__ = ("_fixed", "_leading", "_led_to", "_missing", "_owner", "others")

    def __init__(self, functions: list[FunctionType], members: set[int]) -> None:
        table = functions[0].__globals__
        names = dict.fromkeys(chain.from_iterable(globals_of(function.__code__) for function in functions))
        present = {name: table[name] for name in names if name in table}
        led_to = {name: value for name, value in present.items() if id(value) in members or _leads_nowhere(value)}
        fixed = tuple(name for name, value in present.items() if type(value) in FIXED)
        self._owner, self._led_to = ref(functions[0]), list(map(ref, led_to.values()))
        self._leading, self._fixed = _reader(tuple(led_to)), _reader(fixed)
        self._missing = frozenset(names) - present.keys()  # builtins, and what is not set yet
        self.others = tuple(name for name in present if name not in led_to and name not in fixed)

    def read(self) -> Names | None:
        """The globals of the module; None if these names lead to other functions by now, or to something else."""
        owner = self._owner()
        if owner is None:
            return None
        table = owner.__globals__
        try:
            is_as_noted = all(map(is_, self._leading(table), map(call, self._led_to))) and FIXED.issuperset(
                map(type, self._fixed(table))
            )
        except KeyError:
            return None
        return table if is_as_noted and table.keys().isdisjoint(self._missing) else None


def _reader(names: tuple[str, ...]) -> Read:
    """What reads these names, as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return (lambda table: (table[names[0]],)) if names else (lambda _: ())


_known: WeakKeyDictionary[FunctionType, Group | None] = WeakKeyDictionary()  # None: it reaches no other

Reached = tuple[list[FunctionType], list[tuple[Names, tuple[str, ...]]]]


def find_group(function: FunctionType) -> Reached | None:
    """What `Group.read` gives of a function.

    None if it reaches no other function, holds anything but global names, or is not one of its module's but made anew
    at each call.
    """
    if function.__globals__.get(function.__name__) is not function or not _is_plain(function):
        return None
    group = _known.get(function, _UNKNOWN)
    found = None if group is None or group is _UNKNOWN else group.read()
    if found is None and group is not None:
        functions = _collect(function)
        group = _known[function] = Group(functions) if len(functions) > 1 else None
        found = None if group is None else group.read()
    return found


def _collect(function: FunctionType) -> list[FunctionType]:
    found = {id(function): function}
    waiting = [function]
    while waiting and len(found) < _MOST:
        one = waiting.pop()
        named = map(one.__globals__.get, globals_of(one.__code__))
        new = [value for value in named if type(value) is FunctionType and id(value) not in found and _is_plain(value)]
        found.update((id(value), value) for value in new)
        waiting += new
    return list(found.values())


def _leads_nowhere(value: Any) -> bool:
    """Whether this is a function of torch's or ours that holds nothing of somebody else's."""
    return type(value) is FunctionType and not value.__dict__ and are_of_library(value.__globals__)


def _is_plain(function: FunctionType) -> bool:
    """Whether a function of the user's holds nothing but names: no variables, attributes, or defaults but numbers."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return not (function.__closure__ or function.__dict__ or are_of_library(function.__globals__)) and INERT.issuperset(
        map(type, defaults)
    )
