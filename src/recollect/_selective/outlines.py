"""Outlines of tensors: what a recording remembers of a tensor without holding its memory.

A recording must tell which tensors are views of which, and whether replay gives the same bits. For neither does it need
the values: memory is known by an object that stands for it, and bits by their digest. So a call that learns needs no
more memory than one that follows what was learned.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._recompute.values import digest


class StorageOutline:
    """Stands for a storage, which may be gone."""

    __slots__ = ("_bytes", "_storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage, self._bytes = ref(storage), storage.nbytes()

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it stands for this one."""
        return self._storage() is storage

    def nbytes(self) -> int:
        """How many bytes it has, or had."""
        return self._bytes


class Outline:
    """What is left of a tensor; answers what a tensor answers about where it is in memory."""

    __slots__ = ("_memory", "_offset", "_stride", "dtype", "shape")

    def __init__(self, tensor: Tensor, memory: StorageOutline) -> None:
        self.dtype, self.shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset, self._memory = int(tensor.storage_offset()), memory

    def untyped_storage(self) -> StorageOutline:
        """What stands for its memory: the same object for all outlines of tensors that share it."""
        return self._memory

    def storage_offset(self) -> int:
        """Like a tensor's."""
        return self._offset

    def stride(self) -> tuple[int, ...]:
        """Like a tensor's."""
        return self._stride

    def element_size(self) -> int:
        """Like a tensor's."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Like a tensor's."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """Like a tensor's."""
        return self.dtype.is_floating_point


def share_memory(one: Tensor | Outline, other: Tensor | Outline) -> bool:
    """Whether two tensors, or what is left of them, have or had the same memory."""
    first, second = one.untyped_storage(), other.untyped_storage()
    if isinstance(first, StorageOutline) and not isinstance(second, StorageOutline):
        return first.is_of(second)
    if isinstance(second, StorageOutline) and not isinstance(first, StorageOutline):
        return second.is_of(first)
    return first is second


class TensorDigest:
    """The bits of a tensor, by their digest, and how they are laid out."""

    __slots__ = ("_digest", "_layout")

    def __init__(self, tensor: Tensor) -> None:
        self._layout, self._digest = _layout_of(tensor), _digest_of(tensor)

    def are_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same, in the same layout; waits for the device."""
        if self._layout != _layout_of(tensor):
            return False
        found = _digest_of(tensor)
        with without_dispatch_modes():
            return torch.equal(self._digest, found)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _digest_of(tensor: Tensor) -> Tensor:
    with torch.no_grad(), without_dispatch_modes():  # a policy or a meter around must not see these
        return digest(_pack(tensor))


def _pack(tensor: Tensor) -> Tensor:
    """All elements, each once, in an order that depends on the strides alone, so that digests need no copy."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


class MetStorages:
    """The storages that a recording has met and does not hold."""

    def __init__(self) -> None:
        self._by_id: dict[int, StorageOutline] = {}
        self._bits: dict[tuple[Any, ...], TensorDigest] = {}

    def outline(self, tensor: Tensor) -> Outline:
        """What to remember of a tensor."""
        storage = tensor.untyped_storage()
        memory = self._by_id.get(id(storage))
        if memory is None or not memory.is_of(storage):
            memory = self._by_id[id(storage)] = StorageOutline(storage)
        return Outline(tensor, memory)

    def read_bits(self, tensor: Tensor, outline: Outline) -> TensorDigest:
        """The bits of a tensor; read once for all that are the same part of the same memory."""
        memory = outline.untyped_storage()
        place = (outline.storage_offset(), outline.shape, outline.stride(), outline.dtype, tensor._version)  # noqa: SLF001
        key = (memory, *place)
        found = self._bits.get(key)
        if found is None:
            found = self._bits[key] = TensorDigest(tensor)
        return found
