"""Which modules and optimizers a step works with: those it, or a function it calls, is given, closes over or names."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")

_DEEPEST = 4  # functions that call each other


def find_modules(step: Callable[..., Any], values: Iterable[Any]) -> list[nn.Module]:
    """The outermost modules among a step's arguments and surroundings.

    >>> layer = nn.Linear(2, 2)
    >>> find_modules(lambda x: layer(x), [])
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    found = _unique(_of_kind(nn.Module, [*values, *_surroundings(step)]))
    inner = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in inner]


def find_optimizers(step: Callable[..., Any], values: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers among a step's arguments and surroundings."""
    return _unique(_of_kind(torch.optim.Optimizer, [*values, *_surroundings(step)]))


def _unique(found: Iterable[T]) -> list[T]:
    return list({id(one): one for one in found}.values())


def _of_kind(kind: type[T], values: Iterable[Any]) -> Iterator[T]:
    """Those of a kind among values, in lists and attributes of plain objects too, one level down."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, kind))
        elif isinstance(value, dict):
            yield from (item for item in value.values() if isinstance(item, kind))
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
            yield from (item for item in vars(value).values() if isinstance(item, kind))


def _surroundings(step: Any) -> list[Any]:
    """What a callable is bound to, closes over, and names in its module; and so on for functions among these."""
    found: list[Any] = []
    seen: set[int] = set()
    pending = [(step, 0)]
    while pending:
        one, depth = pending.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        around = _around(one)
        found += around
        if depth < _DEEPEST:
            pending += [(part, depth + 1) for part in around if _is_of_user(part)]
    return found


def _is_of_user(value: Any) -> bool:
    """Whether a value is a function to look into: neither torch's nor ours."""
    if isinstance(value, functools.partial):
        return True
    if not isinstance(value, (FunctionType, MethodType)):
        return False
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] not in ("torch", "recollect")


def _around(step: Any) -> list[Any]:
    if isinstance(step, functools.partial):
        return [step.func, *step.args, *step.keywords.values()]
    found: list[Any] = [step]
    owner = getattr(step, "__self__", None)
    if owner is not None:
        found += [owner, *_attributes(owner)]
    function = getattr(step, "__func__", step)
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        call = vars(type(step)).get("__call__")
        return [*found, *_attributes(step), *(_around(call) if hasattr(call, "__code__") else [])]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet filled
            continue
    names = getattr(function, "__globals__", {})
    return [*found, *(names[name] for name in _names_in(code) if name in names)]


def _attributes(owner: Any) -> list[Any]:
    return [] if isinstance(owner, (type, nn.Module)) else list(getattr(owner, "__dict__", {}).values())


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that code looks up in its module; attributes of the same name are others."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
