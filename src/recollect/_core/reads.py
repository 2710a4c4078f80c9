"""What code reads of what it has put away: names that it reads before it sets them, and entries of dicts.

Told by the order in which code names them. Loops and branches are not followed, and the name of an attribute counts
whichever object it is of.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterable
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

_DEEPEST = 3  # methods that call each other
_SETS = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SETS_VARIABLES = frozenset({"STORE_DEREF", "STORE_GLOBAL"})
_LOADS_VARIABLES = frozenset({"LOAD_DEREF", "LOAD_GLOBAL"})
_ENTRIES = frozenset({"get", "pop", "popitem", "setdefault", "values", "items"})


def carries(kind: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class may read an attribute that an earlier call has set.

    >>> class Recurrent(nn.Module):
    ...     def forward(self, x):
    ...         self.state = x + self.state
    ...         self.result = self.state.exp()
    ...         return self.result
    >>> carries(Recurrent, "state"), carries(Recurrent, "result")
    (True, False)
    """
    return _reads_first(kind, kind.forward, name, _DEEPEST)


def _reads_first(kind: type, method: object, name: str, depth: int) -> bool:
    function = inspect.unwrap(method) if type(method) is FunctionType else method
    if type(function) is not FunctionType:
        return False
    for named, is_set in _first_uses(function.__code__, _LOADS, _SETS):
        if named == name:
            return not is_set
        if not is_set and depth and _reads_first(kind, getattr(kind, named, None), name, depth - 1):
            return True
    return False


def read_attribute(functions: Iterable[FunctionType], name: str) -> bool:
    """Whether one of these names an attribute before it sets it."""
    return any((name, False) in _first_uses(function.__code__, _LOADS, _SETS) for function in functions)


def read_variable(functions: Iterable[FunctionType], where: CellType | dict[str, Any], name: str | None) -> bool:
    """Whether one of these reads a variable before it sets it: a cell of closures, or a global by its name."""
    for function in functions:
        if isinstance(where, CellType):
            pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            name = next((own for own, cell in pairs if cell is where), None)
        elif function.__globals__ is not where:
            continue
        if (name, False) in _first_uses(function.__code__, _LOADS_VARIABLES, _SETS_VARIABLES):
            return True
    return False


def read_entries(functions: Iterable[FunctionType]) -> bool:
    """Whether one of these may read entries of a dict."""
    return any(_reads_entries(function.__code__) for function in functions)


def functions_of(kinds: Iterable[type]) -> list[FunctionType]:
    """The methods of classes, and of those that they inherit from; not of torch's."""
    bases = dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds))
    own = [vars(base).values() for base in bases if not base.__module__.startswith("torch.")]
    methods = [value for value in chain.from_iterable(own) if type(value) is FunctionType]
    return [method for method in map(inspect.unwrap, methods) if type(method) is FunctionType]


@functools.lru_cache(maxsize=4096)
def _first_uses(code: CodeType, loads: frozenset[str], sets: frozenset[str]) -> tuple[tuple[str, bool], ...]:
    """Names in the order in which code first uses them, functions within it included; whether it then sets them."""
    found: dict[str, bool] = {}
    for step in dis.get_instructions(code):
        if step.opname in sets or step.opname in loads:
            found.setdefault(step.argval, step.opname in sets)
        elif isinstance(step.argval, CodeType):
            for named, is_set in _first_uses(step.argval, loads, sets):
                found.setdefault(named, is_set)
    return tuple(found.items())


@functools.lru_cache(maxsize=4096)
def _reads_entries(code: CodeType) -> bool:
    return any(
        step.opname == "BINARY_SUBSCR"
        or (step.opname == "BINARY_OP" and step.argrepr == "[]")  # Python 3.14
        or (step.opname in _LOADS and step.argval in _ENTRIES)
        or (isinstance(step.argval, CodeType) and _reads_entries(step.argval))
        for step in dis.get_instructions(code)
    )
