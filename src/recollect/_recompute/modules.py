"""What the modules of a region held when forward ran, and their side effects, which happen once.

A region's function is searched for modules (itself, its owner, closures, partials, the globals it names). At entry
their training flags, parameters and buffers are noted, by identity and version. For recomputation

* a tensor that has been *replaced* since (``functional_call``, a swapped parameter) is put back for its duration;
* a tensor that has been *changed in place* since (an optimiser step) is an error, never a wrong gradient;
* a buffer that the region itself updates (running statistics, power iterations, counters) is replaced by a copy of
  its value at entry: recomputation reads what forward read, and what it writes is thrown away.

Which buffers a class updates is learned: the first call of a class copies its buffers and looks which ones moved.
BatchNorm and its kin write without moving the version, so they are listed here. Anything else, Python attributes
included, can be registered with `register_state`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from recollect._core.errors import ChangedInputError
from recollect._core.registry import Registration, Registry

_MISSING = object()
_DEPTH, _DEEPEST = 6, 64

_declared: Registry[tuple[type, frozenset[str]]] = Registry()
# Weakly by class, because parametrizations make a class per module; then by training mode.
_learned: WeakKeyDictionary[type, dict[bool, frozenset[str]]] = WeakKeyDictionary()

# Their statistics are written behind the version counter's back, and are not read while training.
_WRITE_ONLY: dict[type, frozenset[str]] = {
    kind: frozenset({"running_mean", "running_var", "num_batches_tracked"})
    for kind in (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
    )
}


def register_state(module_class: type[nn.Module], *names: str) -> Registration:
    """Say which attributes a module updates in its own forward, so that recomputation does not update them again.

    Recomputation starts from the values at entry of the region and its own updates are thrown away. Buffers that are
    updated in place need no registration; Python attributes (a counter, a list of losses) and buffers that are
    replaced do.

    Args:
        module_class: the class, subclasses included.
        names: attributes: buffers, numbers, lists, dicts, sets; containers are copied one level deep.

    Returns:
        A registration; its `remove` ends it.

    >>> import torch, recollect
    >>> class Counted(torch.nn.Linear):
    ...     calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return super().forward(x).sin()
    >>> registration = recollect.register_state(Counted, "calls")
    >>> layer = Counted(2, 2)
    >>> recollect.checkpoint(layer)(torch.ones(1, 2)).sum().backward()
    >>> layer.calls
    1
    >>> registration.remove()
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        message = f"register_state expects a subclass of torch.nn.Module, not {module_class!r}"
        raise TypeError(message)
    if not names:
        message = f"register_state({module_class.__name__}) needs at least one attribute name"
        raise ValueError(message)
    return _declared.add((module_class, frozenset(names)))


def _rules_of(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Names a class updates after reading them, and names it only writes."""
    none: frozenset[str] = frozenset()
    updated = none.union(*(names for owner, names in _declared.items if issubclass(kind, owner)))
    written = none.union(*(_WRITE_ONLY.get(base, none) for base in kind.__mro__))
    return updated, written - updated


def find_modules(fn: Callable[..., Any], leaves: Iterable[Any]) -> tuple[list[nn.Module], list[Tensor]]:
    """Modules and tensors that a function holds or names, and modules among its arguments; not what they contain."""
    if isinstance(fn, nn.Module):
        modules, tensors = [fn], []
    else:
        search = _Search()
        search.visit(fn, _DEPTH)
        modules, tensors = search.modules, search.tensors
    modules.extend(leaf for leaf in leaves if isinstance(leaf, nn.Module))
    return modules, tensors


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Global names that a function's code mentions, functions within it included."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return tuple(dict.fromkeys((*code.co_names, *chain.from_iterable(map(_names_in, inner)))))


class _Search:
    """Looks for modules and tensors where Python functions keep what they use."""

    __slots__ = ("_seen", "modules", "tensors")

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self._seen: set[int] = set()

    def visit(self, value: Any, depth: int) -> None:
        """Look into closures, defaults, globals, owners of methods, partials, containers and attributes."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
            return
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return
        if depth == 0 or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for part in _parts_of(value):
            if part is not None:
                self.visit(part, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    match value:
        case FunctionType():
            parts: Iterable[Any] = _parts_of_function(value)
        case MethodType():
            parts = (value.__self__, value.__func__)
        case functools.partial():
            parts = (value.func, *value.args, *value.keywords.values())
        case list() | tuple() | set():
            parts = value
        case dict():
            parts = value.values()
        case type() | ModuleType() | BuiltinFunctionType():
            parts = ()
        case _:
            parts = list(getattr(value, "__dict__", {}).values())
    return parts


def _parts_of_function(function: FunctionType) -> list[Any]:
    if function.__module__.partition(".")[0] == "torch":
        return []
    parts: list[Any] = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell not filled yet
            parts.append(cell.cell_contents)
    known = function.__globals__
    for name in _names_in(function.__code__):
        found = known.get(name)
        if found is not None and not isinstance(found, (type, ModuleType, BuiltinFunctionType)):
            parts.append(found)
    return parts


def _version(tensor: Tensor) -> int | None:
    try:
        return tensor._version  # noqa: SLF001
    except RuntimeError:  # an inference tensor has none
        return None


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch.no_grad():
            return value.detach().clone()
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _get(module: nn.Module, name: str) -> Any:
    return module._buffers[name] if name in module._buffers else getattr(module, name)  # noqa: SLF001


def _set(module: nn.Module, name: str, value: Any) -> None:
    if name in module._buffers:  # noqa: SLF001
        module._buffers[name] = value  # noqa: SLF001
    else:
        setattr(module, name, value)


def _is_sharded(tensor: Tensor | None) -> bool:
    return hasattr(tensor, "device_mesh")


_children, _parameters, _buffers = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_buffers")
_training, _version_of = attrgetter("training"), attrgetter("_version")


def _walk(roots: list[nn.Module]) -> list[nn.Module]:
    """Modules and all they contain, level by level. A shared module may come twice; a cycle ends at torch's own walk.

    Whole levels at a time: the loops run in C, 1 µs for a transformer block against 4 module by module.
    """
    found = list(roots)
    level = roots
    for _ in range(_DEEPEST):
        level = list(chain.from_iterable(map(dict.values, map(_children, level))))
        if None in level:
            level = [module for module in level if module is not None]
        if not level:
            return found
        found += level
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def _entries(modules: list[nn.Module], table_of: Callable[[nn.Module], Any]) -> list[Tensor | None]:
    return list(chain.from_iterable(map(dict.values, map(table_of, modules))))


def _versions(tensors: list[Tensor]) -> list[int | None]:
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:  # an inference tensor among them
        return list(map(_version, tensors))


class ModuleState:
    """Modules around one execution of a region: noted at entry, `settle`d at exit, `restore`d for recomputation."""

    __slots__ = ("_buffers", "_modules", "_parameters", "_state", "_training", "_trial", "_versions", "_watched")

    def __init__(self, roots: list[nn.Module], loose: list[Tensor]) -> None:
        modules = self._modules = _walk(roots)
        self._training = list(map(_training, modules))
        self._parameters = _entries(modules, _parameters)
        self._buffers: list[Tensor | None] = _entries(modules, _buffers)
        self._state: list[tuple[nn.Module, str, Any]] = []
        self._trial: list[tuple[nn.Module, str, Tensor, int | None, Tensor]] = []
        if self._buffers or _declared.items:
            for module in modules:
                self._note_state(module)
        # What must not be changed in place before recomputation, and the versions that show it.
        self._watched = [tensor for tensor in self._parameters if tensor is not None] + loose
        if self._buffers:
            exempt = {id(_get(module, name)) for module, name, _ in self._state}
            exempt.update(id(trial[2]) for trial in self._trial)
            self._watched += [t for t in self._buffers if t is not None and id(t) not in exempt]
        self._versions = _versions(self._watched)

    def _note_state(self, module: nn.Module) -> None:
        updated, written = _rules_of(type(module))
        for name in updated:
            self._state.append((module, name, _copy(_get(module, name))))
        learned = _learned.get(type(module), {}).get(module.training)
        for name, tensor in module._buffers.items():  # noqa: SLF001
            if tensor is None or name in updated:
                continue
            if name in written and module.training:
                self._state.append((module, name, _MISSING))
            elif learned is None:
                self._trial.append((module, name, tensor, _version(tensor), _copy(tensor)))
            elif name in learned:
                self._state.append((module, name, _copy(tensor)))

    def settle(self) -> None:
        """At exit: learn which buffers a class updates, and keep their values at entry."""
        for module, name, tensor, version, copied in self._trial:
            if self._learn(module, name, tensor, version):
                self._state.append((module, name, copied))
            else:
                self._watched.append(tensor)
                self._versions.append(version)
        if self._buffers and _versions(self._watched) != self._versions:
            self._learn_late()
        self._trial = []

    def _learn(self, module: nn.Module, name: str, tensor: Tensor, version: int | None) -> bool:
        moved = module._buffers.get(name) is not tensor or _version(tensor) != version  # noqa: SLF001
        known = _learned.setdefault(type(module), {})
        known[module.training] = known.get(module.training, frozenset()) | ({name} if moved else set())
        return moved

    def _learn_late(self) -> None:
        """A class updates a buffer that its first call left alone: its value at entry is lost, this once."""
        versions = dict(zip(map(id, self._watched), self._versions, strict=True))
        for module in self._modules:
            for name, tensor in module._buffers.items():  # noqa: SLF001
                if tensor is not None and id(tensor) in versions:
                    self._learn(module, name, tensor, versions[id(tensor)])

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is a parameter, buffer or closed-over tensor that recomputation reads as it is."""
        return any(tensor is noted for noted in self._watched)

    def is_copy(self, tensor: Tensor) -> bool:
        """During recomputation: whether this tensor stands in for a buffer that the region updates."""
        return any(_get(module, name) is tensor for module, name, _ in self._state)

    def restore(self, region: str) -> ExitStack | None:
        """Before recomputation: set what forward found; gives what puts it back, None if all stands as it stood.

        Raises:
            ChangedInputError: a parameter or buffer was changed in place since.
        """
        if _versions(self._watched) != self._versions:
            self._raise_changed(region)
        modules = self._modules
        if not self._state and (
            list(map(_training, modules)) == self._training
            and _same_objects(_entries(modules, _parameters), self._parameters)
            and _same_objects(_entries(modules, _buffers), self._buffers)
        ):
            return None
        stack = ExitStack()
        try:
            self._put(stack)
        except BaseException:
            stack.close()
            raise
        return stack

    def _put(self, stack: ExitStack) -> None:
        noted = iter((*self._parameters, *self._buffers))
        for table_of in (_parameters, _buffers):
            for module in self._modules:
                table = table_of(module)
                for name, now in table.items():
                    tensor = next(noted, _MISSING)
                    # A sharding engine (FSDP2) swaps plain and sharded parameters around its units: its business.
                    if now is not tensor and isinstance(tensor, Tensor) and _is_sharded(now) == _is_sharded(tensor):
                        table[name] = tensor
                        stack.callback(_put_back, table, name, tensor, now)
        for module, training in zip(self._modules, self._training, strict=True):
            if module.training is not training:
                stack.callback(setattr, module, "training", module.training)
                module.training = training
        for module, name, value in self._state:
            now = _get(module, name)
            _set(module, name, _copy(now if value is _MISSING else value))
            stack.callback(_set, module, name, now)

    def _raise_changed(self, region: str) -> None:
        changed = next(t for t, v in zip(self._watched, self._versions, strict=True) if _version(t) != v)
        what = f"a tensor of shape {list(changed.shape)} that the function closes over"
        for kind, table_of in (("parameter", _parameters), ("buffer", _buffers)):
            for module in self._modules:
                for name, tensor in table_of(module).items():
                    if tensor is changed:
                        what = f"{kind} '{name}' of {type(module).__name__}"
        message = (
            f"region '{region}': {what} was changed in place between forward and recomputation.\n"
            "Recomputation would read the new value: an optimiser step or a weight update ran before this backward.\n"
            "Run backward before the update, or keep this part of the model outside the region. "
            "For a buffer that the module updates itself, see `recollect.register_state`."
        )
        raise ChangedInputError(message)


def _same_objects(now: list[Any], noted: list[Any]) -> bool:
    return len(now) == len(noted) and all(map(is_, now, noted))


def _put_back(table: dict[str, Tensor | None], name: str, ours: Tensor, theirs: Tensor | None) -> None:
    if table.get(name) is ours:  # else someone has set it meanwhile
        table[name] = theirs
