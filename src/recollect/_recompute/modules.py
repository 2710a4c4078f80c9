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
from contextlib import ExitStack
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.errors import ChangedInputError
from recollect._core.registry import Registration, Registry

_MISSING = object()

_declared: Registry[tuple[type, frozenset[str]]] = Registry()
_learned: dict[type, frozenset[str]] = {}

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


@functools.cache
def _rules_of(kind: type, declared: tuple[tuple[type, frozenset[str]], ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Names a class updates after reading them, and names it only writes."""
    none: frozenset[str] = frozenset()
    updated = none.union(*(names for owner, names in declared if issubclass(kind, owner)))
    written = none.union(*(_WRITE_ONLY.get(base, none) for base in kind.__mro__))
    return updated, written - updated


def find_modules(fn: Callable[..., Any], leaves: Iterable[Any]) -> tuple[list[nn.Module], list[Tensor]]:
    """Modules and tensors that a function holds or names, and modules among its arguments; not what they contain."""
    modules: list[nn.Module] = []
    if isinstance(fn, nn.Module):
        modules.append(fn)
        tensors: list[Tensor] = []
    else:
        tensors = []
        _search(fn, modules, tensors, depth=4)
    modules.extend(leaf for leaf in leaves if isinstance(leaf, nn.Module))
    return modules, tensors


def _search(value: Any, modules: list[nn.Module], tensors: list[Tensor], depth: int) -> None:
    if isinstance(value, nn.Module):
        modules.append(value)
    elif isinstance(value, Tensor):
        tensors.append(value)
    elif depth == 0:
        return
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                _search(cell.cell_contents, modules, tensors, depth - 1)
            except ValueError:  # a cell not filled yet
                continue
        names = value.__globals__
        for name in value.__code__.co_names:
            found = names.get(name)
            if isinstance(found, (nn.Module, Tensor)):
                _search(found, modules, tensors, depth - 1)
        for default in value.__defaults__ or ():
            _search(default, modules, tensors, depth - 1)
    elif isinstance(value, MethodType):
        _search(value.__self__, modules, tensors, depth - 1)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _search(part, modules, tensors, depth - 1)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _search(part, modules, tensors, depth - 1)
    elif callable(value) and not isinstance(value, type):
        for part in getattr(value, "__dict__", {}).values():
            if isinstance(part, (nn.Module, Tensor)):
                _search(part, modules, tensors, depth - 1)


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


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


class ModuleState:
    """Modules around one execution of a region: noted at entry, `settle`d at exit, `restore`d for recomputation."""

    __slots__ = ("_loose", "_notes", "_state", "_training", "_trial")

    def __init__(self, roots: list[nn.Module], loose: list[Tensor]) -> None:
        self._loose = [(tensor, _version(tensor)) for tensor in loose]
        self._training: list[tuple[nn.Module, bool]] = []
        self._notes: list[tuple[dict[str, Tensor | None], str, Tensor, int | None]] = []
        self._state: list[tuple[nn.Module, str, Any]] = []
        self._trial: list[tuple[nn.Module, str, Tensor, int | None, Tensor]] = []
        notes, training, declarations = self._notes, self._training, _declared.items
        seen: set[int] = set()
        stack = list(roots)
        while stack:
            module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            training.append((module, module.training))
            parameters = module._parameters  # noqa: SLF001
            for name, tensor in parameters.items():
                if tensor is not None:
                    notes.append((parameters, name, tensor, _version(tensor)))
            declared, write_only = _rules_of(type(module), declarations)
            if module._buffers or declared:  # noqa: SLF001
                self._note_state(module, declared, write_only)
            children = module._modules  # noqa: SLF001
            if children:
                stack.extend(children.values())

    def _note_state(self, module: nn.Module, declared: frozenset[str], write_only: frozenset[str]) -> None:
        for name in declared:
            self._state.append((module, name, _copy(_get(module, name))))
        buffers = module._buffers  # noqa: SLF001
        learned = _learned.get(type(module))
        for name, tensor in buffers.items():
            if tensor is None or name in declared:
                continue
            version = _version(tensor)
            if name in write_only and module.training:
                self._state.append((module, name, _MISSING))
            elif learned is None:
                self._trial.append((module, name, tensor, version, _copy(tensor)))
            elif name in learned:
                self._state.append((module, name, _copy(tensor)))
            else:
                self._notes.append((buffers, name, tensor, version))

    def settle(self) -> None:
        """At exit of the first call of a class: learn which buffers it updates, and keep their values at entry."""
        for module, name, tensor, version, copied in self._trial:
            buffers = module._buffers  # noqa: SLF001
            moved = buffers.get(name) is not tensor or _version(tensor) != version
            known = _learned.get(type(module), frozenset())
            _learned[type(module)] = known | {name} if moved else known
            if moved:
                self._state.append((module, name, copied))
            else:
                self._notes.append((buffers, name, tensor, version))
        self._trial.clear()

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is one of the noted parameters, buffers or closed-over tensors."""
        return any(tensor is noted for _, _, noted, _ in self._notes) or any(tensor is t for t, _ in self._loose)

    def is_copy(self, tensor: Tensor) -> bool:
        """During recomputation: whether this tensor stands in for a buffer that the region updates."""
        return any(_get(module, name) is tensor for module, name, _ in self._state)

    def restore(self, region: str) -> ExitStack | None:
        """Before recomputation: set what forward found; gives what puts it back, None if all stands as it stood.

        Raises:
            ChangedInputError: a parameter or buffer was changed in place since.
        """
        if not self._state and self._is_unchanged():
            return None
        stack = ExitStack()
        try:
            self._put(region, stack)
        except BaseException:
            stack.close()
            raise
        return stack

    def _is_unchanged(self) -> bool:
        for module, training in self._training:
            if module.training is not training:
                return False
        for table, name, tensor, version in self._notes:
            if table.get(name) is not tensor or _version(tensor) != version:
                return False
        return all(_version(tensor) == version for tensor, version in self._loose)

    def _put(self, region: str, stack: ExitStack) -> None:
        for module, training in self._training:
            if module.training is not training:
                stack.callback(setattr, module, "training", module.training)
                module.training = training
        for table, name, tensor, version in self._notes:
            if _version(tensor) != version:
                self._raise_changed(region, table, name)
            now = table.get(name, _MISSING)
            # A sharding engine (FSDP2) swaps plain and sharded parameters around its units; that is its business.
            if now is not tensor and (not isinstance(now, Tensor) or _is_sharded(now) == _is_sharded(tensor)):
                table[name] = tensor
                stack.callback(_put_back, table, name, tensor, now)
        for tensor, version in self._loose:
            if _version(tensor) != version:
                self._raise_changed(region, None, f"a tensor of shape {list(tensor.shape)} that the function closes over")
        for module, name, value in self._state:
            now = _get(module, name)
            _set(module, name, _copy(now if value is _MISSING else value))
            stack.callback(_set, module, name, now)

    def _raise_changed(self, region: str, table: dict[str, Tensor | None] | None, name: str) -> None:
        what = name
        for module, _ in self._training:
            if table is module._parameters:  # noqa: SLF001
                what = f"parameter '{name}' of {type(module).__name__}"
            elif table is module._buffers:  # noqa: SLF001
                what = f"buffer '{name}' of {type(module).__name__}"
        message = (
            f"region '{region}': {what} was changed in place between forward and recomputation.\n"
            "Recomputation would read the new value: an optimiser step or a weight update ran before this backward.\n"
            "Run backward before the update, or keep this part of the model outside the region. "
            "For a buffer that the module updates itself, see `recollect.register_state`."
        )
        raise ChangedInputError(message)


def _put_back(table: dict[str, Tensor | None], name: str, ours: Tensor, theirs: Any) -> None:
    if table.get(name) is not ours:  # someone else has set it meanwhile
        return
    if theirs is _MISSING:
        del table[name]
    else:
        table[name] = theirs
