"""Names of policies for graphs: a graph carries constants only, and caches know it by them.

A key must differ wherever decisions may, also from one process to the next, because compiled code is stored on disk. A
policy of the catalogue is known by its words. A user's function is known by its code and by the plain values that it
closes over; where it reads anything else, by a number that no other process has.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from recollect._core.errors import CompileError
from recollect._core.torch_private.ops import op_name
from recollect._policy.base import CallPolicy, FunctionPolicy, Policy
from recollect._policy.combine import Combination
from recollect._policy.places import SaveModules
from recollect._policy.presets import ReadyMade

_PLAIN = (type(None), bool, int, float, str, bytes)
_FIXED = frozenset({"builtins", "torch", "recollect", "math", "operator", "functools", "itertools", "re"})
_process = uuid.uuid4().hex
_numbers = itertools.count()

# What the operators in graphs find their policies by, the latest used last. A graph may be traced again at any time, so
# it is the oldest that are forgotten when there are too many: those of a program that makes policies without end.
_MOST = 1024
_policies: dict[str, Policy] = {}
_known: dict[int, tuple[Policy, str]] = {}


def list_sources(*patterns: str) -> list[Path]:
    """Files of this library, by patterns from its folder."""
    package = Path(__file__).parents[1]
    return sorted({path for pattern in patterns for path in package.glob(pattern)})


def digest_sources(*patterns: str) -> str:
    """A part of keys that changes with our code, because what older code compiled lies in caches."""
    found = hashlib.sha256()
    for path in list_sources(*patterns):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


_RULES = digest_sources("_compile/*.py", "_policy/*.py", "_core/operators.py")


def key_of(policy: Policy | None) -> str:
    """The name that a policy, or none, has in graphs.

    >>> from recollect import policies
    >>> key_of(policies.save_matmuls).split(" ", 1)[1]
    'save_matmuls'
    """
    if policy is None:
        return _RULES
    found = _known.get(id(policy))
    if found is None:
        key = f"{_RULES} {policy!r}"
        unsaid = list(_unsaid_in(policy))
        if unsaid:
            key += " " + hashlib.sha256("\n".join(map(_describe, unsaid)).encode()).hexdigest()[:16]
        found = (policy, key)
        _remember(_known, id(policy), found)
    _remember(_policies, found[1], _policies.get(found[1], policy))
    return found[1]


def has_functions(policy: Policy) -> bool:
    """Whether users' functions decide, which may go by anything that a site says."""
    return any(not isinstance(one, type | Policy) for one in _unsaid_in(policy))


def goes_by_names(policy: Policy | None) -> bool:
    """Whether a policy may go by the name of the region that it is asked about."""
    return policy is not None and has_functions(policy) and not isinstance(policy, CallPolicy)


def name_of_all(name: str) -> str:
    """The name that all of a list's equal blocks have in graphs.

    >>> name_of_all("layers.3.mlp"), name_of_all("0"), name_of_all("block2")
    ('layers.*.mlp', '*', 'block2')
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def policy_of(key: str) -> Policy | None:
    """The policy of that name, which was named in this process.

    Raises:
        CompileError: it was not, or so many have been since that it is forgotten.
    """
    if key == _RULES:
        return None
    policy = _policies.get(key)
    if policy is None:
        message = (
            f"a graph holds a region under the policy '{key.partition(' ')[2] or key}', which is not known here.\n"
            f"The graph comes from another process or another version of recollect, or {_MOST} policies were made "
            "since. Trace the model again, and make a policy once, not in every step."
        )
        raise CompileError(message)
    _remember(_policies, key, policy)
    return policy


def _remember(table: dict[Any, Any], at: Any, value: Any) -> None:
    """Note it as the latest."""
    table.pop(at, None)
    table[at] = value
    if len(table) > _MOST:
        del table[next(iter(table))]


def _unsaid_in(policy: Policy) -> Iterator[Any]:
    """What decides and does not stand in a policy's words.

    Users' functions and predicates, classes, of which the words are the names, and what a ready-made policy keeps in
    one kind of block.
    """
    if isinstance(policy, Combination):
        for part in policy.parts():
            yield from _unsaid_in(part)
    elif isinstance(policy, FunctionPolicy):
        yield policy.fn
    elif isinstance(policy, SaveModules):
        yield from (pattern for pattern in policy.patterns if isinstance(pattern, type))
    elif isinstance(policy, ReadyMade):
        yield policy.policy
    else:
        for name in getattr(type(policy), "__slots__", ()):
            value = getattr(policy, name, None)
            if isinstance(value, Policy):
                yield from _unsaid_in(value)
            elif callable(value) and not isinstance(value, type):
                yield value


def _describe(value: Any) -> str:
    """All that its answers depend on, as text; a number of its own where that cannot be written."""
    is_known = isinstance(value, type) and "<locals>" not in value.__qualname__
    try:
        return f"{value.__module__}.{value.__qualname__}" if is_known else _write(value, ())
    except TypeError:
        return f"{_process}:{next(_numbers)}"


def _write(value: Any, around: tuple[Any, ...]) -> str:
    """A value as text that another value does not have.

    Raises:
        TypeError: there is no such text, because it may change where nobody sees.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | frozenset):  # not what may change: lists, sets, dicts
        parts = [_write(part, around) for part in value]
        return f"{type(value).__name__}({','.join(parts if isinstance(value, tuple) else sorted(parts))})"
    if isinstance(value, functools.partial):
        return f"partial{_write((value.func, value.args, tuple(value.keywords.items())), around)}"
    if isinstance(value, Policy | enum.Enum | torch.dtype) or op_name(value) is not None:
        return key_of(value) if isinstance(value, Policy) else str(value)
    return _write_code_of(value, around)


def _write_code_of(value: Any, around: tuple[Any, ...]) -> str:
    """A function by its code and what that uses; what comes with Python or torch by its name."""
    if not isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType):
        raise TypeError(type(value))
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    is_made = isinstance(value, FunctionType) and value.__closure__  # by another function, for what it closes over
    if home.partition(".")[0] in _FIXED and not is_made:
        return f"{home}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, FunctionType):
        return "itself" if value in around else _write_function(value, (*around, value))
    raise TypeError(type(value))


def _write_function(fn: FunctionType, around: tuple[Any, ...]) -> str:
    cells = tuple(cell.cell_contents for cell in fn.__closure__ or ())
    used = tuple(fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__)
    parts = [cells, fn.__defaults__ or (), tuple((fn.__kwdefaults__ or {}).values()), used]
    return f"{_write_code(fn.__code__)}{[_write(tuple(part), around) for part in parts]}"


def _write_code(code: CodeType) -> str:
    constants = [_write_code(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{constants}"
