"""The memory that parameters and buffers have before a step, which may give them other memory: ``p.data = ...``.

Whoever is to have it back must hold it meanwhile, where the step would let go of it. So an average of weights that is
made anew, as a teacher's is, would count twice. Once a step is seen to have exchanged some and nobody else has it, a
copy on the host is held in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from recollect._core.torch_private.storages import count_holders
from recollect._core.torch_private.versions import set_version, version_of
from recollect._profile.storages import storages_of

_PLAIN = frozenset({Tensor, nn.Parameter})
_SOON = 16  # operators after one that has read the old values, in which a tensor is looked at


class TensorMemories:
    """The memory of tensors by tensor; iterates over all of them."""

    def __init__(self) -> None:
        self._known: dict[int, TensorMemory] = {}
        self._by_storage: dict[int, TensorMemory] = {}
        self._read: dict[int, int] = {}  # what may be exchanged soon, by storage: how often it will still be looked at

    def __iter__(self) -> Iterator[TensorMemory]:
        return iter(self._known.values())

    def add(self, tensor: Tensor) -> None:
        """Know what memory a tensor has; the first time counts."""
        if id(tensor) not in self._known:
            memory = self._known[id(tensor)] = TensorMemory(tensor)
            storages = storages_of(tensor)
            if len(storages) == 1:
                self._by_storage[id(storages[0][0])] = memory

    def note_read(self, tensor: Tensor) -> None:
        """An operator reads a tensor, and autograd will not ask for its gradient: it may be given other memory soon."""
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            key = id(tensor.untyped_storage())
            if key in self._by_storage:
                self._read[key] = _SOON

    def look(self) -> None:
        """Another operator is about to run: let go of memory that was exchanged meanwhile."""
        for key in tuple(self._read):
            self._read[key] -= 1
            if self._by_storage[key].let_go():
                del self._read[key], self._by_storage[key]
            elif not self._read[key]:
                del self._read[key]


class TensorMemory:
    """The memory that a parameter or buffer had, how often it had been written into, and whether it was trained."""

    __slots__ = ("_before", "_copy", "_requires_grad", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._before: Tensor | None = tensor.data
        self._copy: tuple[Tensor, torch.device] | None = None
        self._version, self._requires_grad = version_of(tensor), tensor.requires_grad

    @property
    def was_written(self) -> bool:
        """Whether it was written into, and still is the same memory."""
        is_same = self._before is not None and _is_same_memory(self.tensor, self._before)
        return is_same and version_of(self.tensor) != self._version

    def let_go(self) -> bool:
        """Hold a copy on the host instead, if the tensor has other memory now and nobody else has this one."""
        before = self._before
        if before is None or before.layout is not torch.strided:
            return False
        storage = before.untyped_storage()
        if self.tensor.layout is not torch.strided or self.tensor.untyped_storage() is storage:
            return False
        if count_holders(storage) > 1:
            return False
        kept = storage.clone() if before.device.type == "cpu" else storage.cpu()
        on_host = torch.empty(0, dtype=before.dtype)
        on_host.set_(kept, before.storage_offset(), before.size(), before.stride())
        self._copy, self._before = (on_host, before.device), None
        return True

    def restore(self) -> None:
        """Give the tensor its memory back, or other memory with the same values."""
        tensor = self.tensor
        if self._copy is not None:
            values, device = self._copy
            tensor.data = values.to(device)
        elif self._before is not None and not _is_same_memory(tensor, self._before):
            tensor.data = self._before
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        set_version(tensor, self._version)


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    if (tensor.dtype, tensor.shape, tensor.layout) != (other.dtype, other.shape, other.layout):
        return False
    ours, theirs = storages_of(tensor), storages_of(other)
    same = len(ours) == len(theirs) and all(one is two for (one, _), (two, _) in zip(ours, theirs, strict=True))
    is_strided = tensor.layout is torch.strided
    return same and (
        not is_strided or (tensor.stride(), tensor.storage_offset()) == (other.stride(), other.storage_offset())
    )
