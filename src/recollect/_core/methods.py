"""What the forward of a module may run: methods, by the names in its code, and the functions that these reach.

Names are all that code tells before it runs, so more may be found than runs. What Python builds from texts
(``getattr(self, f"step_{n}")()``) is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from recollect._core.authors import is_users_own
from recollect._core.function_groups import names_in
from recollect._core.reachable import find_all_held

_BEGINS = ("forward", "__call__")


def find_methods(kinds: Iterable[type]) -> list[FunctionType]:
    """Methods of the user's own classes of modules that read variables of closures, or globals other than code."""
    found = _find_run(kinds, lambda base: is_users_own(base.__module__))
    return [function for _, method in found if method.reads and (function := method.function()) is not None]


def find_run_code(kinds: Iterable[type]) -> list[tuple[type | None, CodeType]]:
    """The code that forwards of these classes may run, with the class that it is a method of; None for functions."""
    found: list[tuple[type | None, CodeType]] = []
    for base, method in _find_run(kinds, lambda base: not base.__module__.startswith("torch.")):
        found.append((base, method.code))
        found += [(None, code) for code in method.helpers]
    return found


def code_of(fn: Callable[..., Any]) -> list[CodeType]:
    """The code of a function or method, and of the functions that it reaches."""
    while isinstance(fn, partial):
        fn = fn.func
    function = _function_of(fn) or _function_of(vars(type(fn)).get("__call__"))
    return [] if function is None else [function.__code__, *(one.__code__ for one in find_all_held(function).functions)]


class _Method:
    """What is known of a method. Holds code, which leads to nothing.

    Attributes:
        function: the method; weak.
        code: its own.
        helpers: the code of the functions that it reaches.
        reads: whether it reads variables of closures, or globals other than code.
        names: all that this code names.
    """

    __slots__ = ("code", "function", "helpers", "names", "reads")

    def __init__(self, function: FunctionType) -> None:
        held = find_all_held(function)
        self.function, self.code = ref(function), function.__code__
        self.reads = bool(held.cells or held.globals or held.holders)
        self.helpers = [one.__code__ for one in held.functions if one is not function]
        wrapped = getattr(function, "__wrapped__", None)
        if type(wrapped) is FunctionType and wrapped.__code__ in self.helpers:  # a decorator, in which the method is
            self.helpers.remove(wrapped.__code__)
            self.helpers.append(self.code)
            self.code = wrapped.__code__
        self.names = names_in(self.code).union(*map(names_in, self.helpers))


_methods: WeakKeyDictionary[type, dict[str, _Method]] = WeakKeyDictionary()


def _look_into(base: type, name: str) -> _Method | None:
    function = _function_of(vars(base).get(name))
    if function is None:
        return None
    known = _methods.setdefault(base, {})
    method = known.get(name)
    if method is None or method.function() is not function:
        method = known[name] = _Method(function)
    return method


def _function_of(value: Any) -> FunctionType | None:
    """The function of a method, property or the like."""
    function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    return function if type(function) is FunctionType else None


def _find_run(kinds: Iterable[type], counts: Callable[[type], bool]) -> Iterator[tuple[type, _Method]]:
    """The methods that forwards of these classes may call, and where they were written.

    Those that a class overrides are among them: ``super()`` asks for them. Not called is what torch's modules have,
    too, such as ``to``: tensors have that.
    """
    by_name: dict[str, list[type]] = {}
    for base in filter(counts, dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds))):
        for name in vars(base):
            if name in _BEGINS or not hasattr(nn.Module, name):
                by_name.setdefault(name, []).append(base)
    waiting = [name for name in _BEGINS if name in by_name]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        for base in by_name[name]:
            method = _look_into(base, name)
            if method is not None:
                yield base, method
                new = [other for other in method.names if other in by_name and other not in seen]
                seen.update(new)
                waiting += new
