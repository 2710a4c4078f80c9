"""What stands for a saved tensor while it is forgotten, and for one that was handed over but may be read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame


class Slot:
    """Stands for one saved tensor. Autograd's node holds it; it holds the frame."""

    __slots__ = ("__weakref__", "frame", "kept", "value", "version")

    frame: Frame
    value: Tensor | None  # in a pass that frees the graph
    kept: Tensor | Handed | None  # in a pass that keeps it: before and after it was handed to a node
    version: int  # of the value when it was saved


def claim(pack: Callable[[Tensor], Any], frame: Frame) -> None:
    """Say whose saved-tensor hook this is, for regions inside to see."""
    pack.frame = frame  # type: ignore[attr-defined]


def frame_of(pack: Callable[[Tensor], Any]) -> Frame | None:
    """The frame whose hook this is, in forward or in recomputation; None if it is somebody else's."""
    frame: Frame | None = getattr(pack, "frame", None)
    return frame


class Handed:
    """A value that was handed to a node in a pass that keeps the graph: alive only while someone uses it."""

    __slots__ = ("dtype", "offset", "pass_id", "shape", "storage", "strides", "whole")

    def __init__(self, value: Tensor, pass_id: int) -> None:
        self.pass_id = pass_id
        self.whole: ref[Tensor] | None = None
        if type(value) is not Tensor or value.layout is not torch.strided:
            self.whole = ref(value)
            return
        self.storage = ref(value.untyped_storage())
        self.dtype, self.offset, self.shape, self.strides = (
            value.dtype,
            value.storage_offset(),
            value.shape,
            value.stride(),
        )

    def again(self) -> Tensor | None:
        """The value, if it is still alive."""
        if self.whole is not None:
            return self.whole()
        storage = self.storage()
        if storage is None:
            return None
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.strides)
