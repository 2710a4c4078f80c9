"""What code reads of what it has put away: names that it reads before it sets them, and entries of dicts; what it sets.

Told by the order in which code names them. Loops and branches are not followed: an assignment of an attribute counts
if no branch leads around it. The name of an attribute counts whichever object it is of.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from recollect._core.methods import code_of, find_run_code

_SETS = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_SETS_VARIABLES = frozenset({"STORE_DEREF", "STORE_GLOBAL"})
_LOADS_VARIABLES = frozenset({"LOAD_DEREF", "LOAD_GLOBAL"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ENTRIES = frozenset({"get", "pop", "popitem", "setdefault", "values", "items"})
_PUTS = frozenset({"append", "appendleft", "add", "extend", "insert", "update", "put"})  # and give nothing
_TAKES = frozenset({"pop", "popleft", "popitem", "remove", "discard", "clear"})
_BY_TEXT = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter"})


def may_carry(
    module: nn.Module, name: str, modules: Iterable[nn.Module], hooks: Iterable[Callable[..., Any]] = ()
) -> bool:
    """Whether a forward may read an attribute that an earlier call has set, rather than only show its last result.

    So it is if some code that may run reads it before it sets it: of the module's class, of functions and hooks, or of
    other modules that have no such attribute of their own.

    Args:
        module: whose attribute.
        name: its name.
        modules: all that run, this one among them.
        hooks: those on them.

    >>> class Recurrent(nn.Module):
    ...     def forward(self, x):
    ...         self.state = x + self.state
    ...         self.result = self.state.exp()
    ...         return self.result
    >>> module = Recurrent()
    >>> may_carry(module, "state", [module]), may_carry(module, "result", [module])
    (True, False)
    """
    others = list(modules)
    for owner, code in find_run_code(dict.fromkeys(map(type, others))):
        if reads_first(code, name) and (
            owner is None
            or isinstance(module, owner)
            or not any(isinstance(other, owner) and _has(other, name) for other in others)
        ):
            return True
    return any(reads_first(code, name) for hook in hooks for code in code_of(hook))


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, without making it."""
    table = vars(module)
    return any(name in held for held in (table, table["_modules"], table["_parameters"], table["_buffers"])) or hasattr(
        type(module), name
    )


def reads_first(code: CodeType, name: str) -> bool:
    """Whether code may read an attribute before it sets it; an assignment that may be skipped does not count."""
    names, texts = _attributes_read(code)
    return name in names or any(name.startswith(text) for text in texts)


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


def read_entries(codes: Iterable[CodeType]) -> bool:
    """Whether some of this code may read entries of a dict."""
    return any(map(_reads_entries, codes))


def only_collects(function: FunctionType) -> bool:
    """Whether a function gives nothing, sets no attribute and writes into no tensor: it may put things away, at most.

    >>> only_collects(lambda module, args, result: seen.append(result))
    True
    >>> only_collects(lambda module, args, result: result * 2 if module.training else None)
    False
    """
    return _only_collects(function.__code__)


@functools.lru_cache(maxsize=4096)
def _only_collects(code: CodeType) -> bool:
    if any(name.endswith("_") and not name.startswith("__") for name in code.co_names) or "setattr" in code.co_names:
        return False
    last, method = "", ""
    for step in dis.get_instructions(code):
        if step.opname in _SETS or isinstance(step.argval, CodeType):
            return False
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
        gives_nothing = last == "None" or (last == "CALL" and method in _PUTS)
        if step.opname == "RETURN_VALUE" and (step.is_jump_target or not gives_nothing):
            return False
        if step.opname in _LOADS:
            method = step.argval
        last = step.opname if step.opname != "LOAD_CONST" else str(step.argval)
    return True


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


@functools.lru_cache(maxsize=4096)
def takes_out(code: CodeType) -> bool:
    """Whether code may take something out of a collection in an attribute, which it may have put there before."""
    last, attributes = "", set[str]()  # variables that stand for attributes, for a moment
    for step in dis.get_instructions(code):
        if step.opname == "DELETE_SUBSCR" or (isinstance(step.argval, CodeType) and takes_out(step.argval)):
            return True
        if step.opname in _LOADS and step.argval in _TAKES and last == "attribute":
            return True
        if step.opname == "STORE_FAST" and last == "attribute":
            attributes.add(step.argval)
        is_attribute = step.opname == "LOAD_ATTR" or (step.opname == "LOAD_FAST" and step.argval in attributes)
        last = "attribute" if is_attribute else step.opname
    return False


def functions_of(kinds: Iterable[type]) -> list[FunctionType]:
    """The methods of classes, and of those that they inherit from; not of torch's."""
    bases = dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds))
    own = [vars(base).values() for base in bases if not base.__module__.startswith("torch.")]
    methods = [value for value in chain.from_iterable(own) if type(value) is FunctionType]
    return [method for method in map(inspect.unwrap, methods) if type(method) is FunctionType]


@functools.lru_cache(maxsize=4096)
def _attributes_read(code: CodeType) -> tuple[frozenset[str], tuple[str, ...]]:
    """Attributes that code may read before it sets them, and texts that the names of others begin with."""
    steps = list(dis.get_instructions(code))
    jumps = [(step.offset, step.argval) for step in steps if step.opcode in _JUMPS]
    read, was_set = set[str](), set[str]()
    texts: list[str] = []
    for step in steps:
        if step.opname in _LOADS and step.argval not in was_set:
            read.add(step.argval)
        elif step.opname in _SETS and not any(start < step.offset < end for start, end in jumps):
            was_set.add(step.argval)
        elif isinstance(step.argval, CodeType):
            inner, inner_texts = _attributes_read(step.argval)
            read |= inner - was_set
            texts += inner_texts
    if not _BY_TEXT.isdisjoint(code.co_names):
        texts += [const for const in code.co_consts if isinstance(const, str) and const]
    return frozenset(read), tuple(texts)


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
