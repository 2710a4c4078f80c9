"""What a Python function and its arguments lead to: modules, tensors and the like.

Looked at are the function itself, its owner, closure, defaults, the globals that it names, containers, and functions of
the user's among these. Not found: a module in a plain list inside another module, and what a function reaches through
calls of library code.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor, nn

from recollect._core.authors import is_users_own
from recollect._core.function_groups import FIXED, INERT, are_of_library, find_group, globals_of
from recollect._core.generators import generator_kinds

_MOST_PARTS = 128
_MOST_PARTS_OF_STEP = 4096
_DEEPEST = 5  # functions that call each other, objects in each other
_CODE = FIXED | {FunctionType}
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_KEPT_IN_OBJECTS = (nn.Module, Tensor, *_CONTAINERS)
_COLLECTIONS = (list, dict, set, deque)
_ENDS = frozenset({type(None), type(object.__call__)})  # that lead nowhere: nothing, and slots of C code
_NOT_ATTRIBUTES = frozenset({"__dict__", "__weakref__"})  # among the slots of a class
_CACHED = type(functools.lru_cache(len))
_FOUND = (nn.Module, Tensor)
_USUAL = frozenset(_COLLECTIONS)
_OWN_CLASS = "__class__"  # the variable of a method that calls `super`
_LIKE_COLLECTIONS = (*_COLLECTIONS, SimpleNamespace)
_NOT_OBJECTS = (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType, enum.Enum)
T = TypeVar("T")

Global = tuple[dict[str, Any], str]
"""A global variable: the names of its module, and its own."""


def find_reachable(kind: type[T], step: Callable[..., Any], values: Iterable[Any]) -> list[T]:
    """What of one kind a step works with: among its arguments and their attributes, and in its surroundings.

    >>> layer = nn.Linear(2, 2)
    >>> find_reachable(nn.Module, functools.partial(print, {"net": [layer]}), [])
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    found: dict[int, T] = {}
    seen: set[int] = set()
    pending = deque([(value, 0) for value in (*values, step)])
    while pending and len(seen) < _MOST_PARTS_OF_STEP:
        value, depth = pending.popleft()
        if type(value) in INERT or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            found[id(value)] = value
        elif depth < _DEEPEST and not isinstance(value, (nn.Module, Tensor, type, ModuleType)):
            pending.extend((part, depth + 1) for part in _parts_of(value, (object,)))
    return list(found.values())


def find_holders(step: Callable[..., Any], values: Iterable[Any], *, of_user: bool = False) -> list[Any]:
    """Where a step can leave things: containers, objects' attributes and globals, as dicts, and cells of closures.

    Modules are not holders, but the objects among their attributes are, and what their forward names.

    Args:
        step: a function, or a model.
        values: its arguments.
        of_user: whether to look at the user's own functions and objects only, and not into modules.

    >>> losses = []
    >>> losses in find_holders(functools.partial(print, losses), [])
    True
    """
    holders: dict[int, Any] = {}
    seen: set[int] = set()
    pending = deque([(value, 0) for value in (*values, step)])
    while pending and len(seen) < _MOST_PARTS_OF_STEP:
        value, depth = pending.popleft()
        if type(value) in INERT or id(value) in seen or isinstance(value, (Tensor, type)):
            continue
        seen.add(id(value))
        if of_user and not _is_of_user(value):
            continue
        if isinstance(value, nn.Module):
            inside = list(value.modules())
            parts = chain.from_iterable(vars(part).values() for part in inside)
            pending.extend((part, depth + 1) for part in parts if hasattr(part, "__dict__"))
            forwards: Iterable[Any] = (getattr(type(part), "forward", None) for part in inside)  # TorchScript has none
            pending.extend((forward, depth + 1) for forward in dict.fromkeys(forwards))
            continue
        holders.update((id(holder), holder) for holder in _holders_in(value))
        if depth < _DEEPEST:
            pending.extend((part, depth + 1) for part in _parts_of(value, (object,)))
    return list(holders.values())


def _is_of_user(value: Any) -> bool:
    kind = type(value)
    if kind is FunctionType:
        return is_users_own(value.__globals__.get("__name__") or "")
    if kind in (MethodType, functools.partial) or isinstance(value, _CONTAINERS):
        return True
    return not isinstance(value, nn.Module) and (kind is SimpleNamespace or is_users_own(kind.__module__))


def _holders_in(value: Any) -> list[Any]:
    if type(value) is FunctionType:
        if is_of_library(value):
            return []
        return [value.__globals__, *(value.__closure__ or ())]
    if isinstance(value, _COLLECTIONS):
        return [value]
    attributes = getattr(value, "__dict__", None)
    return [attributes] if type(attributes) is dict else []


def read_cell(cell: CellType) -> list[Any]:
    """What a closure's variable is, if it is anything yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def find_roots(step: Callable[..., Any], values: Iterable[Any]) -> list[nn.Module]:
    """The outermost modules that a step works with."""
    found = find_reachable(nn.Module, step, values)
    inner = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in inner]


class Found:
    """What a function holds or names; not what the modules contain.

    Attributes:
        modules: also those among its arguments.
        tensors: others than parameters and buffers of these.
        generators: of random numbers.
        functions: of the user's, itself among them, where it holds anything.
        cells: variables of closures, where it and the functions that it calls read what others may set.
        globals: the same in modules of the user's own, but for code, collections and objects.
        holders: collections there, and objects of the user's own classes, in which it may collect something.
    """

    __slots__ = ("cells", "functions", "generators", "globals", "holders", "modules", "tensors")

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self.functions: list[FunctionType] = []
        self.cells: list[CellType] = []
        self.globals: list[Global] = []
        self.holders: list[Any] = []


def find_held(fn: Callable[..., Any], objects: Iterable[Any] = ()) -> Found:
    """What a function holds or names, and the modules among its arguments."""
    found = Found()
    if isinstance(fn, nn.Module):
        found.modules.append(fn)
    elif type(fn) is MethodType and isinstance(fn.__self__, nn.Module) and _holds_nothing(fn.__func__, found.globals):
        found.modules.append(fn.__self__)  # the usual forward, met at every call of a region
    elif not _holds_nothing(fn, found.globals):
        found.globals = []
        if type(fn) is not FunctionType and is_holder(type(fn)):
            found.holders.append(fn)
        _search(fn, found)
    if objects:
        found.modules.extend(item for item in objects if isinstance(item, nn.Module))
    return found


def find_all_held(function: FunctionType) -> Found:
    """What a function holds or names; all functions that it reaches are among it, also those that hold nothing."""
    found = Found()
    _search(function, found)
    return found


def is_holder(kind: type) -> bool:
    """Whether user code may collect something in objects of this class: a collection, or a class of the user's own."""
    return (
        kind in _USUAL
        or issubclass(kind, _LIKE_COLLECTIONS)
        or (
            is_users_own(kind.__module__)
            and not issubclass(kind, _NOT_OBJECTS)
            and (kind.__dictoffset__ != 0 or bool(slots_of(kind)))
        )
    )


def slots_of(kind: type) -> list[str]:
    """The attributes for which objects of a class have a place of their own, rather than in a dictionary."""
    named = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = chain.from_iterable((one,) if isinstance(one, str) else one for one in named)
    return [name for name in names if name not in _NOT_ATTRIBUTES]


def is_of_library(fn: Any) -> bool:
    """Whether a function, or the method that this is, was written in torch or here."""
    while type(fn) is functools.partial:
        fn = fn.func
    names = getattr(getattr(fn, "__func__", fn), "__globals__", None)
    return names is not None and are_of_library(names)


def _holds_nothing(fn: Any, found: list[Global], depth: int = 2) -> bool:
    """Whether a plain function's defaults and globals hold nothing but numbers, nor do the functions among them.

    If so, the globals that hold these numbers are added to what was found.
    """
    if type(fn) is not FunctionType or fn.__closure__ or fn.__dict__:
        return False
    parts = list(map(fn.__globals__.get, globals_of(fn.__code__)))
    if fn.__defaults__:
        parts += fn.__defaults__
    if fn.__kwdefaults__:
        parts += fn.__kwdefaults__.values()
    if FIXED.issuperset(map(type, parts)):
        return True
    if not INERT.issuperset(map(type, parts)) and not (
        depth > 0 and all(_holds_nothing(part, found, depth - 1) for part in parts if type(part) not in INERT)
    ):
        return False
    _add_globals(fn, found)
    return True


def _add_globals(fn: FunctionType, found: list[Global]) -> None:
    """Name what a function of the user's own reads of its module, but for code, collections and objects."""
    names = globals_of(fn.__code__)
    if names:
        _add_names(fn.__globals__, names, found)


def _add_names(known: dict[str, Any], names: Iterable[str], found: list[Global]) -> None:
    if is_users_own(known.get("__name__") or ""):
        found += [
            (known, name)
            for name in names
            if name in known
            and (kind := type(known[name])) not in _CODE
            and not issubclass(kind, type)
            and not is_holder(kind)
        ]


def _search(fn: Callable[..., Any], found: Found) -> None:
    """Look where Python functions keep what they use; about 1 µs per function on the way."""
    modules: list[Any] = found.modules
    tensors: list[Any] = found.tensors
    generators, holders = found.generators, found.holders
    seen = {id(fn)}
    random_kinds = generator_kinds()
    stack: list[Any] = [fn]
    while stack:
        value = stack.pop()
        is_function = type(value) is FunctionType
        for part in _parts_of_reached(value, found) if is_function else _parts_of(value):
            kind = type(part)
            if kind is BuiltinFunctionType:
                part, kind = part.__self__, type(part.__self__)  # noqa: PLW2901 (of `losses.append`: the list)
            if kind in INERT or issubclass(kind, type):  # of classes, also those of other kinds, such as abstract ones
                continue
            if kind is not FunctionType:
                if isinstance(part, _FOUND):
                    (modules if isinstance(part, nn.Module) else tensors).append(part)
                    continue
                if kind in random_kinds:
                    generators.append(part)
                    continue
            if id(part) not in seen and len(seen) < _MOST_PARTS:
                seen.add(id(part))
                stack.append(part)
                if kind is not FunctionType and is_holder(kind):
                    holders.append(part)


def _parts_of_reached(function: FunctionType, found: Found) -> list[Any]:
    """What to look at next, of a function and of those that it reaches by global names."""
    group = None if function.__closure__ or function.__dict__ else find_group(function)
    if group is None:
        return _parts_of_function(function, found)
    functions, named = group
    found.functions += functions
    parts: list[Any] = []
    for known, names in named:
        if names:
            _add_names(known, names, found.globals)
            parts += map(known.__getitem__, names)
    return parts


def _parts_of(value: Any, kept: tuple[type, ...] = _KEPT_IN_OBJECTS) -> Iterable[Any]:
    """What to look at next; of a plain object's attributes only those of some kinds."""
    kind = type(value)
    if kind is FunctionType:
        return _parts_of_function(value)
    if kind is MethodType:
        return (value.__self__, value.__func__)
    if kind is functools.partial:
        return (value.func, *value.args, *value.keywords.values()) if value.keywords else (value.func, *value.args)
    if kind is _CACHED:
        return (value.__wrapped__,)
    if isinstance(value, _CONTAINERS):
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return parts if len(value) <= _MOST_PARTS else ()
    found: list[Any] = []
    attributes = getattr(value, "__dict__", None)
    if attributes:
        random_kinds = generator_kinds()
        found = [part for part in attributes.values() if isinstance(part, kept) or type(part) in random_kinds]
    wrapped, called = getattr(value, "__wrapped__", None), kind.__dict__.get("__call__")
    return [*found, *(part for part in (wrapped, called) if type(part) not in _ENDS)]


def _parts_of_function(function: FunctionType, found: Found | None = None) -> list[Any]:
    """The same of a function; adds its variables, if asked to."""
    known, code = function.__globals__, function.__code__
    # By where it is written: a wrapper bears the module of what it wraps, which its attributes lead to.
    if are_of_library(known):
        return list(function.__dict__.values()) if function.__dict__ else []
    cells, names = _cells_of(function), globals_of(code)
    if found is not None:
        found.functions.append(function)
        found.cells += cells
        if names:
            _add_names(known, names, found.globals)
    parts: list[Any] = []
    for cell in cells:
        try:  # not `suppress`: this runs at every call of a region
            parts.append(cell.cell_contents)
        except ValueError:
            continue
    if function.__defaults__:
        parts += function.__defaults__
    if function.__kwdefaults__:
        parts += function.__kwdefaults__.values()
    if function.__dict__:
        parts += function.__dict__.values()
    if names:
        parts += [known[name] for name in names if name in known]
    return parts


def _cells_of(function: FunctionType) -> tuple[CellType, ...]:
    """The variables that a function closes over, but for the class that its ``super()`` asks for."""
    cells, names = function.__closure__, function.__code__.co_freevars
    if not cells or _OWN_CLASS not in names:
        return cells or ()
    return tuple(cell for name, cell in zip(names, cells, strict=True) if name != _OWN_CLASS)
