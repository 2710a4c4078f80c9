"""What code reads of what it has put away: names that it reads before it sets them, and entries of dicts; what it sets.

Told by the order in which code names them. Loops and branches are not followed, and the name of an attribute counts
whichever object it is of.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import Counter
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


def sets_twice(kind: type) -> frozenset[str]:
    """Attributes that the methods of a class set in several places, but for its constructor: a flag, and back.

    >>> class Guarded(nn.Module):
    ...     def forward(self, x):
    ...         self.is_busy = True
    ...         self.result = x.exp()
    ...         self.is_busy = False
    ...         return self.result
    >>> sets_twice(Guarded)
    frozenset({'is_busy'})
    """
    methods = (method for method in functions_of([kind]) if method.__name__ != "__init__")
    counts = Counter(chain.from_iterable(_stores(method.__code__) for method in methods))
    return frozenset(name for name, count in counts.items() if count > 1)


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
def _stores(code: CodeType) -> tuple[str, ...]:
    """Attributes that code sets, functions within it included; as often as it does so."""
    steps = list(dis.get_instructions(code))
    inner = (step.argval for step in steps if isinstance(step.argval, CodeType))
    return (*(step.argval for step in steps if step.opname in _SETS), *chain.from_iterable(map(_stores, inner)))


@functools.lru_cache(maxsize=4096)
def _reads_entries(code: CodeType) -> bool:
    return any(
        step.opname == "BINARY_SUBSCR"
        or (step.opname == "BINARY_OP" and step.argrepr == "[]")  # Python 3.14
        or (step.opname in _LOADS and step.argval in _ENTRIES)
        or (isinstance(step.argval, CodeType) and _reads_entries(step.argval))
        for step in dis.get_instructions(code)
    )
