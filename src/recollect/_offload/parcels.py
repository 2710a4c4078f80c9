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
from recollect._offload.kinds import Kind

if TYPE_CHECKING:
    from recollect._offload.jobs import ReadJob, WriteJob
    from recollect._offload.pinned import Buffer
    from recollect._offload.steps import SeenStep


class Parcel:
    """A stretch of bytes, and where it is. Stands in the graph for the tensor that was saved first.

    Exactly one of these holds it: `alias` (it has not left, or not for good), a `buffer` in host memory, a `written`
    job of a slower tier; beside that, for the time of a backward pass, `returned`.

    Attributes:
        storage: what it is part of, weakly.
        kind: of the tensor that was saved first, whose stretch it is.
        root: that tensor, or what it is a view of, weakly.
        version: of the tensor when it was saved.
        alias: a tensor on the original memory; None once it has left.
        is_constant: it has no history: a buffer, an input, a mask, or what an operator made in addition to its result.
        is_changed: somebody wrote into it before it had left.
        is_used: backward has asked for it.
        stays: it is not sent.
        is_leaving: it is on its way out, and `alias` holds the memory meanwhile.
        goes_on: `buffer` is a stage on its way to a slower tier.
        is_flying: it is on its way back, or there, and has not been asked for.
        lanes: those of its device; None if it is in host memory by nature.
        stream: the one that computed when it was saved; later the one to whose memory it came back.
        buffer: in host memory, once a copy to there was begun.
        out: the mark of that copy, which is number `turn` of all that the session began.
        written: the job that writes it to a slower tier.
        reading: the job that reads it from there.
        returned: bytes on the device, and whose way back they are on, `back`.
        met: the stream that has waited for `out`, and later for `back`.
        asked: how many saved tensors the running backward pass has yet to ask for; `pass_id` says in which.
        users: how many saved tensors it stands for: the first, and each `ParcelView` that lives.
        step: what it is part of; `number` says which.
    """

    __slots__ = (
        "__weakref__",
        "alias",
        "asked",
        "back",
        "buffer",
        "goes_on",
        "is_changed",
        "is_constant",
        "is_flying",
        "is_leaving",
        "is_used",
        "kind",
        "lanes",
        "met",
        "number",
        "out",
        "pass_id",
        "reading",
        "returned",
        "root",
        "stays",
        "step",
        "storage",
        "stream",
        "turn",
        "users",
        "version",
        "written",
    )

    def __init__(
        self, tensor: Tensor, storage: ref[torch.UntypedStorage], kind: Kind, step: SeenStep, number: int
    ) -> None:
        self.is_constant = self.is_changed = self.is_used = False
        self.stays = self.is_leaving = self.is_flying = self.goes_on = False
        self.users, self.asked, self.turn, self.pass_id = 1, 0, 0, -1
        self.out: Any = None
        self.back: Any = None
        self.met: Any = None
        self.buffer: Buffer | None = None
        self.returned: Tensor | None = None
        self.written: WriteJob | None = None
        self.reading: ReadJob | None = None
        self.storage, self.kind, self.step, self.number = storage, kind, step, number
        base = tensor._base  # noqa: SLF001
        self.root, self.version = ref(tensor if base is None else base), tensor._version  # noqa: SLF001
        self.alias: Tensor | None = tensor.detach()
        lanes = self.lanes = kind.lanes
        self.stream: Any = None if lanes is None else lanes.current()

    def __del__(self) -> None:
        if self.is_leaving or self.returned is not None or self.written is not None or self.reading is not None:
            self.step.transfers.forget(self)
        elif self.buffer is not None:
            self.buffer.give_back(self.out if self.back is None else self.back)

    def __str__(self) -> str:
        return f"value {self.number} of the step ({self.kind})"

    def serves(self, tensor: Tensor, of: Kind) -> bool:
        """Whether another saved tensor of the same storage, of that kind, is in it as it is now.

        Only tensors that autograd knows to be views of one another count writes together: parts made by
        ``unsafe_chunk``, as in recurrent networks, share a storage and nothing else. A tensor of the same layout may be
        a detached twin, which counts them too, or one made by ``.data``, which does not: so somebody must be there who
        saw no write since.
        """
        version, kind, alias = tensor._version, self.kind, self.alias  # noqa: SLF001
        if self.version != version or self.is_changed:
            return False
        base, root = tensor._base, self.root()  # noqa: SLF001
        if root is not (tensor if base is None else base):
            witness = root if alias is None else alias
            if of is not kind or witness is None or witness._version != version:  # noqa: SLF001
                return False
        if kind.codec is not None and of.dtype is not kind.dtype:
            return False
        if alias is not None and alias._version != version:  # noqa: SLF001
            return False
        return kind.start <= of.start and of.start + of.size <= kind.start + kind.size

    def check(self) -> None:
        """Raise if it was written into before it had left.

        Raises:
            ChangedInputError: it was.
        """
        if self.is_changed or (self.alias is not None and self.alias._version != self.version):  # noqa: SLF001
            self.is_changed = True
            message = (
                f"{self} was changed in place after it was saved for backward, before it was offloaded.\n"
                "The gradient needs its old value.\n"
                "Use the out-of-place form of that operation, or save a clone."
            )
            raise ChangedInputError(message)


class ParcelView:
    """Stands in the graph for a saved tensor whose bytes are in a parcel that was there before."""

    __slots__ = ("kind", "parcel")

    def __init__(self, kind: Kind, parcel: Parcel) -> None:
        self.kind, self.parcel = kind, parcel
        parcel.users += 1

    def __del__(self) -> None:
        self.parcel.users -= 1


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
                f"it is at version {tensor._version}, and was saved at version {self.version}.\n"  # noqa: SLF001
                "The gradient needs its old value.\n"
                "Use the out-of-place form of that operation, or save a clone."
            )
            raise ChangedInputError(message)
        return tensor


def tensors_here(packed: Any) -> list[Tensor] | None:
    """The tensors that one of our packed objects holds where they were; None for an object of others."""
    if isinstance(packed, Stayed):
        return [packed.tensor]
    if isinstance(packed, (Parcel, ParcelView)):
        alias = packed.alias if isinstance(packed, Parcel) else packed.parcel.alias
        return [] if alias is None else [alias]
    return None
