"""What travels: a stretch of one storage, once, however many saved tensors are views of it.

A saved tensor is told by its storage, offset, shape, stride and version. It comes back with the same strides, and at
an address that is as well aligned. Storages are compared by their Python objects, which live as long as the memory: an
address that is used again is another storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.errors import ChangedInputError

if TYPE_CHECKING:
    from recollect._offload.compression import Codec
    from recollect._offload.jobs import ReadJob, WriteJob
    from recollect._offload.pinned import Buffer
    from recollect._offload.transfers import Transfers

_ALIGNMENT = 256  # of where a stretch starts; allocators of devices give that much or more


class Parcel:
    """A stretch of bytes, and where it is.

    Exactly one of these holds it: `alias` (it has not left, or not for good), a `buffer` in host memory, a `written`
    job of a slower tier; beside that, for the time of a backward pass, `returned`.

    Attributes:
        storage: what it is part of, weakly.
        start: its first byte there.
        size: in bytes.
        travel_bytes: after compression.
        version: of the tensor when it was saved.
        label: in words, for errors.
        alias: a tensor on the original memory; None once it has left.
        is_constant: it has no history: a buffer, an input, a mask, or what an operator saved of its result.
        is_changed: somebody wrote into it before it had left.
        stays: it is not sent.
        is_leaving: it is on its way out, and `alias` holds the memory meanwhile.
        is_on_host: it is in host memory by nature, and needs no lanes.
        lanes: those of its device.
        stream: the one that computed when it was saved.
        buffer: in host memory, once a copy to there was begun.
        out: the mark of that copy.
        written: the job that writes it to a slower tier.
        reading: the job that reads it from there.
        returned: bytes on the device, and whose way back they are on, `back`.
        asked: how many saved tensors the running backward pass has yet to ask for; `pass_id` says in which.
        users: how many saved tensors are views of it.
        step: what it is part of; `number` says which.
    """

    __slots__ = (
        "__weakref__",
        "alias",
        "asked",
        "back",
        "buffer",
        "codec",
        "device",
        "dtype",
        "is_changed",
        "is_constant",
        "is_leaving",
        "is_on_host",
        "label",
        "lanes",
        "number",
        "out",
        "owner",
        "pass_id",
        "reading",
        "returned",
        "size",
        "start",
        "stays",
        "step",
        "storage",
        "stream",
        "travel_bytes",
        "users",
        "version",
        "written",
    )

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, version: int, owner: Transfers) -> None:
        self.owner = owner
        self.storage = ref(storage)
        self.start, self.size = stretch_of(tensor, storage)
        self.is_on_host = owner.is_on_host(tensor.device)
        self.lanes: Any = None if self.is_on_host else owner.lanes_of(tensor.device)
        self.dtype, self.device, self.version = tensor.dtype, tensor.device, version
        self.alias: Tensor | None = tensor.detach()
        self.codec: Codec | None = None
        self.travel_bytes = self.size
        self.number, self.users, self.asked, self.pass_id = 0, 0, 0, -1
        self.label: tuple[Any, ...] = (tensor.shape, tensor.dtype, tensor.device)
        self.is_constant = not tensor.requires_grad
        self.stays = self.is_leaving = self.is_changed = False
        self.stream: Any = None
        self.step: Any = None
        self.out: Any = None
        self.back: Any = None
        self.buffer: Buffer | None = None
        self.returned: Tensor | None = None
        self.written: WriteJob | None = None
        self.reading: ReadJob | None = None

    def __del__(self) -> None:
        self.owner.forget(self)

    def __str__(self) -> str:
        shape, dtype, device = self.label
        kind = str(dtype).removeprefix("torch.")
        return f"value {self.number} of the step ({kind}{list(shape)} on {device})"

    def serves(self, tensor: Tensor, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether another saved tensor is in it, as it is now."""
        if self.storage() is not storage or self.version != version or self.is_changed:
            return False
        if self.codec is not None and tensor.dtype is not self.dtype:
            return False
        if self.alias is not None and self.alias._version != version:  # noqa: SLF001
            return False
        start, size = stretch_of(tensor, storage)
        return self.start <= start and start + size <= self.start + self.size

    def check(self) -> None:
        """Raise if it was written into before it had left.

        Raises:
            ChangedInputError: it was.
        """
        if self.is_changed or (self.alias is not None and self.alias._version != self.version):  # noqa: SLF001
            self.is_changed = True
            message = (
                f"{self} was changed in place after it had been saved for backward, before it was sent away.\n"
                "Its gradient needs the value that it had.\n"
                "Use the out-of-place form of that operation, or save a clone."
            )
            raise ChangedInputError(message)


class Handle:
    """Stands for one saved tensor in the graph."""

    __slots__ = ("dtype", "offset", "parcel", "shape", "stride")

    def __init__(self, tensor: Tensor, parcel: Parcel) -> None:
        self.parcel = parcel
        self.offset = tensor.storage_offset()
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        parcel.users += 1

    def __del__(self) -> None:
        self.parcel.users -= 1

    def on(self, storage: torch.UntypedStorage, start: int, device: torch.device) -> Tensor:
        """The tensor, on a storage whose first byte is byte `start` of the original."""
        tensor = torch.empty(0, dtype=self.dtype, device=device)
        offset = self.offset - start // tensor.itemsize
        return tensor.set_(storage, offset, self.shape, self.stride)


class Stayed:
    """Stands for a saved tensor that never travels: a parameter, a leaf, a small one."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf comes back as itself. Of others the history is not held: it might lead back here.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version: int = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            ChangedInputError: it was written into.
        """
        tensor = self.tensor
        if not tensor.is_inference() and tensor._version != self.version:  # noqa: SLF001
            kind = str(tensor.dtype).removeprefix("torch.")
            message = (
                f"a tensor saved for backward ({kind}{list(tensor.shape)} on {tensor.device}) was changed in place: "
                f"it is at version {tensor._version}, and was at {self.version}.\n"  # noqa: SLF001
                "Its gradient needs the value that it had.\n"
                "Use the out-of-place form of that operation, or save a clone."
            )
            raise ChangedInputError(message)
        return tensor


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


def tensors_here(packed: Any) -> list[Tensor] | None:
    """The tensors that one of our packed objects holds where they were; None for an object of others."""
    if isinstance(packed, Stayed):
        return [packed.tensor]
    if isinstance(packed, Handle):
        alias = packed.parcel.alias
        return [] if alias is None else [alias]
    return None
