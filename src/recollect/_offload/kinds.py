"""What kind of tensor was saved: how it lies in its storage, and which bytes travel for it.

Tensors of one kind differ in their bytes only. In a training step the same kinds come again and again, so all that can
be said of one is worked out once, and later tensors are only compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recollect._core.torch_private.copies import memory_maker
from recollect._core.torch_private.guards import make_guard

if TYPE_CHECKING:
    from recollect._offload.compression import Codec, Compression
    from recollect._offload.streams import Lanes

_ALIGNMENT = 256  # of where a stretch starts; allocators of devices give that much or more

_Key = tuple[int, torch.Size, tuple[int, ...], int, torch.dtype, torch.device]


class Kind:
    """How a saved tensor lies in its storage, and what travels for it. A session has one object for each kind.

    Attributes:
        total: bytes of the storage.
        shape, stride, offset, dtype, device: of the tensor.
        start: the first byte of the storage that travels.
        size: how many bytes travel, before compression.
        travel_bytes: after it.
        codec: what compresses them; None if nothing does.
        lanes: those of the device, once they are known; None if it is in host memory by nature.
        is_dense: whether the tensor is all of the storage, each byte once: it is then copied as it is.
        make: gives memory on the device for what travels: the tensor itself if it is dense, flat bytes if not.
    """

    __slots__ = (
        "__weakref__",
        "_guards",
        "codec",
        "device",
        "dtype",
        "is_dense",
        "lanes",
        "make",
        "offset",
        "shape",
        "size",
        "start",
        "stride",
        "total",
        "travel_bytes",
    )

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, codec: Codec | None) -> None:
        self.total, self.shape, self.stride = storage.nbytes(), tensor.shape, tensor.stride()
        self.offset, self.dtype, self.device = int(tensor.storage_offset()), tensor.dtype, tensor.device
        self.start, self.size = stretch_of(tensor, storage)
        self.codec = codec
        self.lanes: Lanes | None = None
        self._guards: list[Callable[[Tensor], bool] | None] = [None, None]  # of one with a history, and of one without
        self.travel_bytes = self.size if codec is None else codec.encoded_bytes(self.size)
        self.is_dense = codec is None and self.offset == 0 and tensor.nbytes == self.total and _is_dense(tensor)
        lies = (self.shape, self.stride, self.dtype) if self.is_dense else ((self.size,), (1,), torch.uint8)
        self.make = memory_maker(self.device, *lies)

    def fits(self, tensor: Tensor, storage: torch.UntypedStorage, is_constant: bool) -> bool:  # noqa: FBT001
        """Whether a tensor is known to be of this kind; if not, it may be nevertheless. A third of finding its kind.

        `is_constant` says that it has no history, and so requires no grad.
        """
        guard = self._guards[is_constant]
        return (
            guard is not None
            and guard(tensor)
            and storage.nbytes() == self.total
            and (self.is_dense or tensor.storage_offset() == self.offset)  # one that fills its storage begins with it
        )

    def note(self, tensor: Tensor) -> None:
        """A tensor is of this kind."""
        if self._guards[tensor.is_leaf] is None:
            self._guards[tensor.is_leaf] = make_guard(tensor)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"

    def over(self, flat: Tensor) -> Tensor:
        """Flat bytes as a tensor of this kind, which must be dense."""
        return flat.narrow(0, 0, self.size).view(self.dtype).as_strided(self.shape, self.stride)

    def on(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """A tensor of this kind, on a storage whose first byte is byte `start` of the original."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.set_(storage, self.offset - start // tensor.itemsize, self.shape, self.stride)


class Kinds:
    """The kinds in use: of steps that are remembered, and of values that live."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._all: WeakValueDictionary[_Key, Kind] = WeakValueDictionary()

    def find(self, tensor: Tensor, storage: torch.UntypedStorage) -> Kind:
        """The kind of a tensor."""
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        key = (storage.nbytes(), shape, stride, offset, tensor.dtype, tensor.device)
        kind = self._all.get(key)
        if kind is None:
            codec = self._compression.codec_for(tensor.dtype, stretch_of(tensor, storage)[1])
            kind = self._all[key] = Kind(tensor, storage, codec)
        kind.note(tensor)
        return kind


def stretch_of(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """First byte and length of what travels for a tensor: its whole storage, or its part if that is less than half."""
    total, item = storage.nbytes(), tensor.itemsize
    if tensor.numel() * item * 2 >= total:
        return 0, total
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = int(tensor.storage_offset())
    start = offset * item // _ALIGNMENT * _ALIGNMENT
    length = (offset + last + 1) * item - start
    return (0, total) if length * 2 >= total else (start, length)


def bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    """A stretch of a storage as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (size,), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
