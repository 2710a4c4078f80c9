"""What stands for a saved tensor while it is forgotten, and for one that was handed over but may be read again.

A handle is a whole number: what the pack hook gives to autograd. It is an object of its own, above the numbers that
Python shares, and the frame holds it too, so that its reference count tells whether autograd still has it. The frame
itself lives through the hooks, which every saved tensor of its graph holds. Against an object with a weak reference for
each saved tensor this saves about half of what packing costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame
    from recollect._recompute.hooks import Meta

FIRST = 1 << 20
"""The first handle of each frame: far above the small numbers of which Python keeps one object each."""

(_FORGOTTEN,) = map(getrefcount, [object()])  # what is counted of something that only a list holds


def find_live(handles: list[int]) -> list[bool] | None:
    """Which handles autograd, or whoever packed by hand, still has; None if all of them, which is the usual case."""
    if min(map(getrefcount, handles), default=_FORGOTTEN + 1) > _FORGOTTEN:
        return None
    return [count > _FORGOTTEN for count in map(getrefcount, handles)]


def is_live(handles: list[int], index: int) -> bool:
    """Whether somebody still has this handle."""
    return getrefcount(handles[index]) > _ALONE


def _count_alone(things: list[Any]) -> int:
    return getrefcount(things[0])


_ALONE = _count_alone([object()])


def frame_of(pack: Callable[[Tensor], Any]) -> Frame | None:
    """The frame whose pack hook this is, in forward or in recomputation; None if it is somebody else's.

    Whoever puts a hook of a frame in force sets its attribute `frame`, for regions inside to see.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A saved tensor of a region, for those who look on: what stands for it, and what there is of it."""

    frame: Frame
    index: int

    @property
    def value(self) -> Tensor | None:
        """The tensor, while a pass has it or where it was never forgotten."""
        frame = self.frame
        found = frame.values.get(self.index) or frame.kept.get(self.index) or (frame.held or {}).get(self.index)
        return None if found is None or isinstance(found, Handed) else found[0]

    @property
    def meta(self) -> Meta | None:
        """Shape, dtype, device and version; None where they were not noted."""
        metas = self.frame.metas
        return metas[self.index] if self.index < len(metas) else None


def find_slot(packed: Any, unpack_hook: Callable[[Any], Tensor] | None) -> Slot | None:
    """The slot behind what a pack hook gave; None if it is not a region's."""
    frame = getattr(unpack_hook, "__self__", None)
    is_ours = isinstance(packed, int) and getattr(type(frame), "unpack", None) is getattr(unpack_hook, "__func__", None)
    return Slot(frame=frame, index=packed - FIRST) if is_ours and hasattr(frame, "handles") else None  # type: ignore[arg-type]
