"""What lies behind a saved tensor: the tensor itself, or what a region or other hooks hold in its place.

The one place that knows how regions pack (`_open`, `_list_metas`, `_list_held`). Everything that looks into graphs
(`print_saved`, `on_oom`, profiles) goes through `Packed.parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recollect._core.torch_private.graph import NodeValue
from recollect._core.torch_private.pytree import tree_leaves
from recollect._offload.parcels import tensors_here
from recollect._recompute.frame import Frame
from recollect._recompute.handles import Slot, find_slot

Meta = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing behind a saved tensor.

    Attributes:
        tensor: what is held; None if nothing is, here.
        region: the region that holds it, or will make it again; empty if none does.
        holder: the region that holds it to run again, as one of its arguments or kept values; empty if none does.
        what: what that region calls it: ``"argument 0"``.
        is_forgotten: whether `region` has let it go and will make it again.
        is_whole: whether hooks left the tensor as it is; not if they put it into something.
        shape: of a forgotten tensor, where it is known; so `dtype` and `device`.
    """

    tensor: Tensor | None = None
    region: str = ""
    holder: str = ""
    what: str = ""
    is_forgotten: bool = False
    is_whole: bool = True
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What a packed object of a region stands for: the execution, which of its saved tensors, and its value now."""

    frame: Frame
    key: int
    value: Tensor | None
    is_forgotten: bool


def _open(value: Any, held: NodeValue) -> _Opened | None:
    """What a packed object is, if a region packed it; None for what others made.

    Args:
        value: the object.
        held: what it was found in, whose hook it was packed by.
    """
    slot = value if isinstance(value, Slot) else find_slot(value, held.unpack_hook)
    if slot is None:
        return None
    is_forgotten = slot.value is None and slot.frame.inputs is not None
    return _Opened(frame=slot.frame, key=slot.index, value=slot.value, is_forgotten=is_forgotten)


def _list_metas(frame: Frame) -> dict[int, Meta]:
    """Shape, dtype and device of what a frame's packed objects stand for, by the keys that `_open` gives."""
    return {index: meta for index, meta in enumerate(frame.metas) if meta is not None}


def _list_held(frame: Frame) -> Iterator[NodeValue]:
    """What a frame itself holds to run again."""
    for what, value in frame.held_tensors():
        yield NodeValue(attribute=what, value=value, unpack_hook=None)


class Packed:
    """Looks behind saved tensors. What a region holds to run again counts for the first of its tensors that is met.

    Holds neither regions nor tensors: one of these may look on while the regions of many steps come and go.
    """

    def __init__(self) -> None:
        self._metas: WeakKeyDictionary[Frame, dict[int, Meta]] = WeakKeyDictionary()

    def parts(self, held: NodeValue) -> Iterator[Part]:
        """What is behind one saved tensor; one part without a tensor where hooks of others made something else of it.

        A value that a backward pass has used up, and whose region has let go of it, has no parts.
        """
        found = False
        for leaf in [held.value] if isinstance(held.value, Tensor) else tree_leaves(held.value):
            if isinstance(leaf, Tensor):
                found = True
                yield Part(tensor=leaf, is_whole=leaf is held.value)
            elif (here := tensors_here(leaf)) is not None:
                found = found or bool(here)
                yield from (Part(tensor=tensor) for tensor in here)
            elif (opened := _open(leaf, held)) is not None:
                found = True
                yield from self._unfold(opened)
        if not found:
            yield Part()

    def tensors(self, held: NodeValue) -> Iterator[Tensor]:
        """The tensors among these parts."""
        return (part.tensor for part in self.parts(held) if part.tensor is not None)

    def _unfold(self, opened: _Opened) -> Iterator[Part]:
        frame = opened.frame
        if frame not in self._metas:
            self._metas[frame] = _list_metas(frame)
            for held in _list_held(frame):
                for part in self.parts(held):
                    if part.holder:
                        yield part
                    else:
                        yield replace(part, holder=frame.name, what=held.attribute, region=part.region or frame.name)
        if opened.value is not None:
            yield Part(tensor=opened.value, region=frame.name)
        elif opened.is_forgotten:
            shape, dtype, device = self._metas[frame].get(opened.key, (None, None, None))[:3]
            known = None if shape is None else tuple(shape)
            yield Part(region=frame.name, is_forgotten=True, shape=known, dtype=dtype, device=device)
