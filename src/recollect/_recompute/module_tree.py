"""The modules that a region uses, with the tables in which they keep their parts: found once, then compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, filterfalse
from operator import attrgetter, call, is_, itemgetter
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, jit, nn

from recollect._core.methods import find_methods
from recollect._core.reads import may_carry
from recollect._recompute.module_attributes import ModuleAttributes, Names, Table
from recollect._recompute.module_hooks import ModuleHooks
from recollect._recompute.writes import Place

_DEEPEST = 64  # levels of modules within modules before a cycle is suspected
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_forward = attrgetter("forward")
_LAZY = frozenset({nn.UninitializedParameter, nn.UninitializedBuffer})

_children, _parameters, _buffers = itemgetter("_modules"), itemgetter("_parameters"), itemgetter("_buffers")


def _walk(roots: list[nn.Module]) -> tuple[list[nn.Module], list[Table]]:
    """Modules and all they contain, level by level, and their instance dictionaries.

    A shared module may come twice; a cycle ends at torch's own walk. Whole levels at a time, so that the loops run
    in C.
    """
    modules: list[nn.Module] = []
    attributes: list[Table] = []
    level = roots
    for _ in range(_DEEPEST):
        _refuse_compiled(level)
        modules += level
        found = list(map(vars, level))
        attributes += found
        level = [child for table in map(_children, found) if table for child in table.values() if child is not None]
        if not level:
            return modules, attributes
    modules = list(dict.fromkeys([*roots, *(module for root in roots for module in root.modules())]))
    return modules, list(map(vars, modules))


def _walk_again(roots: list[nn.Module], shape: Shape) -> tuple[list[nn.Module], list[Table]]:
    """What `_walk` gives.

    Raises:
        LookupError: the modules are others than they were, or have other attributes.
    """
    modules: list[Any] = [*roots, *map(call, shape.inner)]
    try:
        tables: list[Any] = list(map(vars, modules))
    except TypeError:  # one that is gone
        raise LookupError from None
    inner = [part for part in _values(list(map(_children, tables))) if part is not None]
    if list(map(len, tables)) != shape.names.sizes or not _same_objects(inner, modules[len(roots) :]):
        raise LookupError
    return modules, tables


def _refuse_compiled(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, jit.ScriptModule):
            name = getattr(module, "original_name", type(module).__name__)
            message = (
                f"a region uses {name}, which is compiled by TorchScript: its contents can be neither seen nor "
                "restored for recomputation. Use the original module, or leave it out of the region"
            )
            raise TypeError(message)


def _values(tables: list[Table]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _same_objects(now: list[Any], noted: list[Any]) -> bool:
    return len(now) == len(noted) and all(map(is_, now, noted))


def find_watched(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those that recomputation must find unchanged. A lazy parameter may take shape inside the region."""
    return [tensor for tensor in tensors if tensor is not None and type(tensor) not in _LAZY]


class Shape:
    """What a tree found that is the same in others of the same root. Holds no module, nor anything that leads to one.

    Attributes:
        inner: the modules below the root; weak.
        names: which attributes are noted.
    """

    __slots__ = ("_forwards", "_kinds", "_methods", "inner", "names")

    def __init__(self, inner: list[nn.Module], kinds: list[type], names: Names, methods: list[FunctionType]) -> None:
        self.inner, self.names = list(map(ref, inner)), names
        self._kinds, self._forwards = list(map(ref, kinds)), _forwards_of(kinds)
        self._methods = list(map(ref, methods))

    def find_methods(self) -> list[FunctionType]:
        """Methods that read variables beyond attributes.

        Raises:
            LookupError: a class has another ``forward`` by now.
        """
        kinds: list[Any] = list(map(call, self._kinds))  # alive, as their modules are
        methods: list[Any] = list(map(call, self._methods))
        if None in methods or _forwards_of(kinds) != self._forwards:
            raise LookupError
        return methods


def _forwards_of(kinds: list[type]) -> list[int]:
    return list(map(id, map(_forward, kinds)))


_known: WeakKeyDictionary[nn.Module, Shape] = WeakKeyDictionary()  # blocks are wrapped anew at each call


class ModuleTree:
    """Modules and all they contain: noted once, so that the calls of a region need not search again.

    Does not hold the modules it was made of, nor their dictionaries, so that they may hold it: their callers give them.

    Args:
        roots: the outermost.
        shape: what an earlier tree has found of the same root.

    Attributes:
        parameters: what their tables of parameters held, module by module.
        parameter_counts: how many each held.
        buffers: the same of buffers.
        buffer_counts: how many.
        children: the same of modules that are part of them.
        child_counts: how many.
        watched: the parameters that recomputation must find unchanged.
        attributes: what else forward may read of them.
        hooks: their forward hooks.
        methods: of the user's own classes, those that read variables beyond attributes.
        written: by training mode, the parameters that forward writes itself, as far as that has been asked.
    """

    __slots__ = (
        *("_empty", "_filled", "_inner", "_inner_tables", "_parts", "_roots"),
        *("attributes", "buffer_counts", "buffers", "child_counts", "children", "hooks", "methods", "parameter_counts"),
        *("parameters", "watched", "written"),
    )

    def __init__(self, roots: list[nn.Module], shape: Shape | None = None) -> None:
        self._roots = list(map(ref, roots))
        modules, attributes = _walk(roots) if shape is None else _walk_again(roots, shape)
        self._inner, self._inner_tables = modules[len(roots) :], attributes[len(roots) :]
        parameters, buffers = list(map(_parameters, attributes)), list(map(_buffers, attributes))
        self.parameters: list[Tensor | None] = _values(parameters)
        self.buffers: list[Tensor | None] = _values(buffers)
        # How many of those each module has: what it adds later, it adds behind them.
        self.parameter_counts, self.buffer_counts = list(map(len, parameters)), list(map(len, buffers))
        children = list(map(_children, attributes))
        self.children: list[nn.Module | None] = _values(children)
        self.child_counts = list(map(len, children))
        tables = [*children, *parameters, *buffers]
        # Apart, because most are empty, and to see that they still are takes less than to read them.
        self._empty = list(filterfalse(None, tables))
        self._filled = list(filter(None, tables))
        self._parts = _values(self._filled)
        self.watched = find_watched(self.parameters)
        self.written: dict[bool, list[Place]] = {}
        self.hooks = ModuleHooks(attributes)
        names = Names(modules, attributes) if shape is None else shape.names
        self.attributes = ModuleAttributes(names, self._inner_tables, is_new=shape is None)
        self.methods = find_methods(set(map(type, modules))) if shape is None else shape.find_methods()

    @classmethod
    def of(cls, roots: list[nn.Module]) -> ModuleTree:
        """A tree of these modules, from what an earlier one has found if that still holds."""
        root = roots[0] if len(roots) == 1 else None
        shape = None if root is None else _known.get(root)
        if shape is not None:
            try:
                return cls(roots, shape)
            except LookupError:
                pass
        tree = cls(roots)
        if root is not None:
            kinds = list(dict.fromkeys(map(type, (root, *tree._inner))))
            _known[root] = Shape(tree._inner, kinds, tree.attributes.names, tree.methods)
        return tree

    def is_of(self, roots: list[nn.Module]) -> bool:
        """Whether these are the modules it was made of, and they hold the same parts, parameters and buffers."""
        return _same_objects(roots, list(map(call, self._roots))) and not any(self._empty) and self.has_same_parts()

    def has_same_parts(self) -> bool:
        """Whether the tables that held something hold the same; others may hold something by now."""
        return _same_objects(_values(self._filled), self._parts)

    def find_set_up(self, roots: list[nn.Module]) -> set[int]:
        """The numbers of modules with hooks, or with more parts, parameters or buffers than before, or above such."""
        modules = self.modules(roots)
        counts = zip(self.parameter_counts, self.buffer_counts, self.child_counts, strict=True)
        now = zip(*self.tables(roots), strict=True)
        own = {
            id(module)
            for module, tables, before in zip(modules, now, counts, strict=True)
            if any(len(table) > count for table, count in zip(tables, before, strict=True))
            or any(map(vars(module).get, _HOOKS))
        }
        return {
            number
            for number, module in enumerate(modules)
            if own and any(id(part) in own for part in (module, *module.modules()))
        }

    def carries(self, roots: list[nn.Module], place: tuple[int, str]) -> bool:
        """Whether forward may read an attribute that an earlier call has set: of the module of this number."""
        known, modules = self.attributes.names.carried, self.modules(roots)
        if place not in known:
            known[place] = may_carry(modules[place[0]], place[1], modules)
        hooks = self.hooks.find(None)  # which come and go
        return known[place] or bool(hooks and may_carry(modules[place[0]], place[1], (), hooks))

    def modules(self, roots: list[nn.Module]) -> list[nn.Module]:
        """All of them."""
        return [*roots, *self._inner]

    def tables(self, roots: list[nn.Module]) -> tuple[Iterator[Table], Iterator[Table], Iterator[Table]]:
        """The tables of parameters, of buffers and of parts that each has now."""
        now = [*map(vars, roots), *self._inner_tables]
        return map(_parameters, now), map(_buffers, now), map(_children, now)
