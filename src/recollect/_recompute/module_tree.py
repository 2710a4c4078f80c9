"""The modules that a region uses, with the tables in which they keep their parts: found once, then compared.

Beside parameters and buffers, forward reads a module's attributes: flags such as ``training``, numbers, texts, tensors,
collections. Noted are those of modules other than torch's own layers, of which only dropouts are likely to be changed,
and other than those of sharding engines, which keep their own books. A number is noted by value, a tensor or collection
by identity: one replaces the other, as a table of positions does that is made anew for each length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any
from weakref import ref

from torch import Tensor, jit, nn

from recollect._core.generators import generator_kinds

_DEEPEST = 64  # levels of modules within modules before a cycle is suspected
_LAZY = frozenset({nn.UninitializedParameter, nn.UninitializedBuffer})

_children, _parameters, _buffers = itemgetter("_modules"), itemgetter("_parameters"), itemgetter("_buffers")

Table = dict[str, Any]
Settings = Any
"""Values of a module's attributes: of one, the value itself, of several, a tuple."""

Place = tuple[int, str]
"""An attribute: the number of its module, and its name."""

_TRAINING = "training"
_PLAIN = frozenset({bool, int, float, str, type(None)})
_COLLECTIONS = frozenset({list, tuple, dict, set})
_TABLES = frozenset(vars(nn.Module())) - {_TRAINING}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_plain(value: Any) -> bool:
    """Whether an attribute of this value is noted by value."""
    return type(value) in _PLAIN


def _name_settings(module: nn.Module) -> tuple[str, ...]:
    """The attributes that forward may read and its caller may set."""
    table = vars(module)
    own = type(module).__module__
    if own.startswith("torch.") and not isinstance(module, _DROPOUTS):
        return (_TRAINING,) if _TRAINING in table else ()
    return tuple(name for name, value in table.items() if name not in _TABLES and _is_noted(value))


def _is_noted(value: Any) -> bool:
    return is_plain(value) or type(value) in _COLLECTIONS or isinstance(value, Tensor)


def _reader_of(names: tuple[str, ...]) -> Callable[[Table], Any]:
    return itemgetter(*names) if names else _read_nothing


def _read_nothing(_: Table) -> None:
    """Of a module without attributes to note."""


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


def _refuse_compiled(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, jit.ScriptModule):
            name = getattr(module, "original_name", type(module).__name__)
            message = (
                f"a region uses {name}, which is compiled by TorchScript: what it holds cannot be seen, nor put back "
                "for recomputation. Use the original module, or leave it out of the region"
            )
            raise TypeError(message)


def _find_generators(tables: Iterable[Table]) -> list[Place]:
    """Random generators among attributes, whatever their names."""
    kinds = generator_kinds()
    return [
        (number, name)
        for number, table in enumerate(tables)
        if not kinds.isdisjoint(map(type, table.values()))
        for name, value in table.items()
        if type(value) in kinds
    ]


def _values(tables: list[Table]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _same_objects(now: list[Any], noted: list[Any]) -> bool:
    return len(now) == len(noted) and all(map(is_, now, noted))


def find_watched(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those that recomputation must find unchanged. A lazy parameter may take shape inside the region."""
    return [tensor for tensor in tensors if tensor is not None and type(tensor) not in _LAZY]


class ModuleTree:
    """Modules and all they contain: noted once, so that the calls of a region need not search again.

    Does not hold the modules it was made of, nor their dictionaries, so that they may hold it: their callers give them.

    Attributes:
        parameters: what their tables of parameters held, module by module.
        parameter_counts: how many each held.
        buffers: the same of buffers.
        buffer_counts: how many.
        children: the same of modules that are part of them.
        child_counts: how many.
        watched: the parameters that recomputation must find unchanged.
        setting_names: of each module, the attributes that are noted.
        sizes: how many attributes each has, of whatever kind.
        generators: the attributes that are random generators.
        is_new: whether no call has ended since it was made.
    """

    __slots__ = (
        *("_empty", "_filled", "_inner", "_inner_attributes", "_parts", "_readers", "_roots", "_unset"),
        *("buffer_counts", "buffers", "child_counts", "children", "generators", "is_new", "parameter_counts"),
        *("parameters", "setting_names", "sizes", "watched"),
    )

    def __init__(self, roots: list[nn.Module]) -> None:
        self._roots = list(map(ref, roots))
        modules, attributes = _walk(roots)
        self._inner, self._inner_attributes = modules[len(roots) :], attributes[len(roots) :]
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
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._parts = _values(self._filled)
        self.watched = find_watched(self.parameters)
        self.setting_names = list(map(_name_settings, modules))
        self.sizes = list(map(len, attributes))
        self._readers = list(map(_reader_of, self.setting_names))
        self.generators = _find_generators(attributes)
        self._unset = {
            (number, name) for number, table in enumerate(attributes) for name in table if table[name] is None
        }
        self.is_new = True

    def is_of(self, roots: list[nn.Module]) -> bool:
        """Whether these are the modules it was made of, and they hold the same parts, parameters and buffers."""
        return _same_objects(roots, list(map(call, self._roots))) and not any(self._empty) and self.has_same_parts()

    def has_same_parts(self) -> bool:
        """Whether the tables that held something hold the same; others may hold something by now."""
        return _same_objects(_values(self._filled), self._parts)

    def modules(self, roots: list[nn.Module]) -> list[nn.Module]:
        """All of them."""
        return [*roots, *self._inner]

    def settings(self, roots: list[nn.Module]) -> list[Settings] | None:
        """The noted attributes of each module, as they are now; None if a module has got or lost one of any kind."""
        tables = self._tables(roots)
        if list(map(len, tables)) != self.sizes:
            return None
        try:
            return list(map(call, self._readers, tables))
        except KeyError:
            return None

    def has_settings(self, roots: list[nn.Module], noted: list[Settings]) -> bool:
        """Whether they are as `settings` gave them."""
        try:
            return self.settings(roots) == noted
        except (RuntimeError, ValueError, TypeError):  # something that cannot be compared, such as another tensor
            return False

    def without(self, settings: list[Settings], places: set[Place]) -> list[Settings]:
        """What `settings` gave, less some values, which are let go of."""
        left = list(settings)
        for number in {number for number, _ in places}:
            names = self.setting_names[number]
            values = settings[number] if len(names) > 1 else (settings[number],)
            kept = [None if (number, name) in places else value for name, value in zip(names, values, strict=True)]
            left[number] = tuple(kept) if len(names) > 1 else kept[0]
        return left

    def find_own_generators(self, roots: list[nn.Module]) -> list[Any]:
        """What is there now where the modules had random generators."""
        tables = self._tables(roots)
        return [tables[number].get(name) for number, name in self.generators]

    def find_new_generators(self, roots: list[nn.Module]) -> list[tuple[Table, str, bool]]:
        """After the first call: random generators that it has made, and whether there was None before, or nothing.

        If it made any, this tree no longer holds: the next call makes another.
        """
        self.is_new = False
        tables, known = self._tables(roots), self.generators
        found = [place for place in _find_generators(tables) if place not in known]
        if found:
            self.sizes = []
        return [(tables[place[0]], place[1], place in self._unset) for place in found]

    def _tables(self, roots: list[nn.Module]) -> list[Table]:
        return [*map(vars, roots), *self._inner_attributes]

    def name_values(self, settings: list[Settings]) -> Iterator[Table]:
        """What `settings` gave, of each module by name."""
        for names, values in zip(self.setting_names, settings, strict=True):
            yield dict(zip(names, values, strict=True)) if len(names) > 1 else dict.fromkeys(names, values)

    def tables(self, roots: list[nn.Module]) -> tuple[Iterator[Table], Iterator[Table], Iterator[Table]]:
        """The tables of parameters, of buffers and of parts that each has now."""
        now = self._tables(roots)
        return map(_parameters, now), map(_buffers, now), map(_children, now)
