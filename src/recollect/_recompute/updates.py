"""Which state a module updates in its own forward: declared by the user, listed here, or learned.

What a class updates is learned at its first call, in each of training and evaluation mode: its buffers, and tensors in
its attributes, are copied, and those that moved, or hold other values, are its own. Those that only a later instance
has are learned at its call. The statistics of BatchNorm and its kin are only written while training, so they are listed
and need no copy. Anything else, Python attributes included, can be declared with `register_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from recollect._core import fake_values
from recollect._core.argument_text import short_repr
from recollect._core.registry import Registration, Registry
from recollect._core.scope import current_run
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.functorch import is_tracked

States = list[tuple[nn.Module, str, Any]]
"""Modules, names of their attributes, and what those are or were."""

declared: Registry[tuple[type, frozenset[str]]] = Registry()
"""What `register_state` was told: classes, and the attributes that they update."""

# Weakly by class, because parametrizations make a class per module; then by training mode and name: whether it moved.
_learned: WeakKeyDictionary[type, dict[bool, dict[str, bool]]] = WeakKeyDictionary()
_NOTHING: Mapping[str, bool] = MappingProxyType({})

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
    """Register attributes that change between a module's calls, so that recomputation reads what forward read.

    Recomputation then starts from the values at entry to the region, and its own updates are discarded. Most state
    needs no registration: buffers that the class updates at its first call or never, attributes that the module or its
    caller sets, tensors in attributes that the module writes into, collections that it changes. Register buffers that
    it updates only now and then (every n-th step), tensors inside collections that it writes into, and what others
    change in place.

    Args:
        module_class: the class, subclasses included.
        names: attributes: buffers, numbers, lists, dicts, sets; containers are copied one level deep.

    Returns:
        A registration; its ``remove`` ends it.

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
        message = f"register_state expects a subclass of torch.nn.Module, not {short_repr(module_class)}"
        raise TypeError(message)
    if not names or not all(isinstance(name, str) for name in names):
        message = f"register_state({module_class.__name__}): expected names of attributes, as in 'calls'; got {names!r}"
        raise ValueError(message)
    return declared.add((module_class, frozenset(names)))


_written_by: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # what classes only write, as listed
_NONE: frozenset[str] = frozenset()


def rules_of(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Names a class updates after reading them, and names it only writes."""
    written = _written_by.get(kind)
    if written is None:
        written = _written_by[kind] = _NONE.union(*(_WRITE_ONLY.get(base, _NONE) for base in kind.__mro__))
    if not declared.items:
        return _NONE, written
    updated = _NONE.union(*(names for owner, names in declared.items if issubclass(kind, owner)))
    return updated, written - updated


def make_scratch(module: nn.Module, name: str, now: Any) -> Any:
    """What recomputation writes in place of a value that it does not read: uninitialized for layers that are listed."""
    is_counted = name == "num_batches_tracked" and getattr(module, "momentum", None) is None
    if type(module) not in _WRITE_ONLY or type(now) is not Tensor or is_counted:
        return copy_value(now)
    with torch.no_grad(), without_dispatch_modes():
        return torch.empty_like(now)


def find_learned(module: nn.Module) -> Mapping[str, bool]:
    """Whether modules of its class update a buffer in its mode, by name; those are missing that none has had yet."""
    by_mode = _learned.get(type(module))
    return _NOTHING if by_mode is None else by_mode.get(module.training, _NOTHING)


def learn(module: nn.Module, name: str, *, moved: bool) -> None:
    """Modules of this class update this buffer in the mode that it is in, or did not at this call."""
    by_name = _learned.setdefault(type(module), {}).setdefault(module.training, {})
    by_name[name] = moved or by_name.get(name, False)


def version_of(tensor: Tensor) -> int | None:
    """A tensor's version; None for an inference tensor, which has none."""
    try:
        return tensor._version  # noqa: SLF001
    except RuntimeError:
        return None


def copy_value(value: Any) -> Any:
    """A copy of a tensor or a collection, one level deep; others as they are."""
    if isinstance(value, Tensor):
        with torch.no_grad(), without_dispatch_modes():  # to copy is not to read: no watch is concerned
            copied = value.detach().clone()
            fake_values.copy_value(value, copied)
            return copied
    return value.copy() if isinstance(value, (list, dict, set)) else value


class Trial:
    """The first call of a class: copies its buffers, and finds out which modules were called."""

    __slots__ = ("_called", "_entries", "_handles")

    def __init__(self) -> None:
        self._entries: list[tuple[nn.Module, str, Tensor, int | None, Tensor]] = []
        self._called: set[int] = set()
        self._handles: dict[int, Any] = {}

    def add(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Put one buffer on trial."""
        self._entries.append((module, name, tensor, version_of(tensor), copy_value(tensor)))
        if id(module) not in self._handles:
            called, run = self._called, current_run()

            def note(called_module: nn.Module, _: Any) -> None:
                if current_run() is run:  # a backward inside the function may recompute others, on copies of buffers
                    called.add(id(called_module))

            self._handles[id(module)] = module.register_forward_pre_hook(note)

    def names(self) -> list[tuple[nn.Module, str]]:
        """The buffers on trial."""
        return [(module, name) for module, name, *_ in self._entries]

    def states(self) -> States:
        """The buffers on trial as they stood at entry."""
        return [(module, name, copied) for module, name, _, _, copied in self._entries]

    def conclude(self) -> list[tuple[nn.Module, str, Tensor, int | None, Tensor]]:
        """Learn from the modules that were called; gives all entries."""
        self.end()
        for module, name, tensor, version, copied in self._entries:
            if id(module) in self._called:
                learn(module, name, moved=has_moved(module, name, tensor, version, copied))
        return self._entries

    def end(self) -> None:
        """Take the hooks away."""
        for handle in self._handles.values():
            handle.remove()


def has_moved(module: nn.Module, name: str, tensor: Tensor, version: int | None, copied: Tensor) -> bool:
    """Whether a buffer was replaced, or written into, since it had this version and these values.

    Values are compared because ``.data`` and some kernels, such as those of batch norm, move no version.
    """
    is_buffer = name in module._buffers  # noqa: SLF001
    # Another tensor in an attribute is no write: see `module_state.py`.
    if (is_buffer and module._buffers[name] is not tensor) or version_of(tensor) != version:  # noqa: SLF001
        return True
    if type(tensor) is not Tensor or tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if is_tracked(tensor) or is_tracked(copied):  # `vmap` gives no one answer
        return False
    with torch.no_grad(), without_dispatch_modes():
        return not torch.equal(tensor, copied)
