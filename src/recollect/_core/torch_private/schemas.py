"""What an operator's schema says: which arguments it writes, whether its results are views of them, its tags.

Private name: `OpOverload._schema`, and the alias information in it.
Replaced by: a public schema object on `torch.ops` overloads.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

__all__ = [
    "TO_COPY",
    "HigherOrderOperator",
    "OpOverload",
    "arguments_named",
    "count_results",
    "gives_alias",
    "in_place_of",
    "is_random",
    "written_arguments",
]


TO_COPY: OpOverload = torch.ops.aten._to_copy.default
_CLONE: OpOverload = torch.ops.aten.clone.default


def is_copy(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator copies its argument: casts it, or lays it out without gaps."""
    return func is TO_COPY or (func is _CLONE and kwargs.get("memory_format") is torch.contiguous_format)


"""The operator behind every cast, autocast's included."""


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the operator writes into."""
    if not isinstance(func, OpOverload):
        return ()
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append((position, argument.name))
    return tuple(found)


def in_place_of(func: Any) -> OpOverload | None:
    """The operator that does the same in place, to its first argument; None if there is none."""
    if not isinstance(func, OpOverload):
        return None
    space, name = func._schema.name.split("::")
    found = getattr(getattr(getattr(torch.ops, space), f"{name}_", None), func._overloadname, None)
    return found if written_arguments(found) else None


def arguments_named(func: Any, *names: str) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that has one of these names."""
    if not isinstance(func, OpOverload):
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((position, argument.name) for position, argument in arguments if argument.name in names)


def gives_alias(func: Any) -> bool:
    """Whether a result is declared to share memory with an argument: a view, or an argument written in place."""
    return isinstance(func, OpOverload) and any(result.alias_info is not None for result in func._schema.returns)


def count_results(func: Any) -> int:
    """How many results the operator gives; 0 where it does not say."""
    return len(func._schema.returns) if isinstance(func, OpOverload) else 0


def subject_of(func: Any, args: tuple[Any, ...]) -> Any:
    """What calls are numbered by: the operator; where it runs compiled code, also the code that it runs."""
    if isinstance(func, OpOverload) or not (args and isinstance(func, HigherOrderOperator) and callable(args[0])):
        return func
    return func, args[0]


def is_random(func: Any) -> bool:
    """Whether the operator draws from a generator."""
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of a random operator really draws: attention kernels are tagged, and rarely have dropout."""
    given = dict(kwargs)
    names = [argument.name for argument in func._schema.arguments]
    given.update(zip(names, args, strict=False))
    for argument in func._schema.arguments:
        value = given.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout") and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
