"""Loading: which copies go in one batch, from which memory to which, after what, and through what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from recollect._core.timetables import TOGETHER
from recollect._offload.kinds import bytes_of
from recollect._offload.parcels import Parcel
from recollect._offload.pinned import Buffer
from recollect._offload.streams import Batch, Lanes, Mark, Times


class Loading:
    """Batches that are being put together, in the order in which they are to travel.

    Small values go in one batch, up to a large one: each batch costs the host as much as several copies. Where times
    are wanted, or a codec is in the way, a value goes alone.

    Attributes:
        batches: those so far.
    """

    __slots__ = ("_lanes", "_open", "_stream", "_times", "batches")

    def __init__(self, times: Times | None) -> None:
        self._times = times
        self._open: Batch | None = None
        self._lanes: Lanes | None = None
        self._stream: object = None
        self.batches: list[Batch] = []

    def add_out(self, parcel: Parcel, alias: Tensor, buffer: Buffer) -> None:
        """A copy from a device, where `alias` is the value, to a buffer of the host."""
        kind = parcel.kind
        if kind.is_dense:
            target = buffer.shaped if buffer.kind is kind else buffer.shape_as(kind)
            self._add(parcel, target, alias, parcel.stream, buffer.busy)
            return
        flat = bytes_of(alias.untyped_storage(), kind.start, kind.size)
        through = None if kind.codec is None else kind.codec.encode
        self._add(parcel, buffer.bytes, flat, parcel.stream, buffer.busy, through)

    def add_back(self, parcel: Parcel, lanes: Lanes, buffer: Buffer) -> None:
        """A copy from a buffer of the host to new memory of the device, made for the stream that computes."""
        if lanes is not self._lanes:
            self._lanes, self._stream = lanes, lanes.current()
        kind, stream = parcel.kind, self._stream
        after = () if parcel.out is None or stream is parcel.met else (parcel.out,)
        if kind.is_dense:
            source = buffer.shaped if buffer.kind is kind else buffer.shape_as(kind)
            self._add(parcel, kind.make(), source, stream, after)
            return
        codec = kind.codec
        through = None if codec is None else lambda small: codec.decode(small, kind.size)
        self._add(parcel, kind.make(), buffer.bytes[: kind.travel_bytes], stream, after, through)

    def _add(  # noqa: PLR0917 (one for each value that travels)
        self,
        parcel: Parcel,
        target: Tensor,
        source: Tensor,
        stream: Any,
        after: Sequence[Mark],
        through: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        batch, lanes = self._open, parcel.lanes
        if batch is None or batch.stream is not stream or batch.lanes is not lanes or through is not None:
            assert lanes is not None
            batch = self._open = Batch(lanes, stream, self._times, through)
            self.batches.append(batch)
        batch.parcels.append(parcel)
        batch.targets.append(target)
        batch.sources.append(source)
        if after and (len(after) > 1 or not batch.after or batch.after[-1] is not after[0]):
            batch.after += after  # mostly one for all: the buffers that a batch left are taken by one again
        if parcel.kind.size >= TOGETHER or self._times is not None or through is not None:
            self._open = None

    def by_lanes(self) -> list[tuple[Lanes, list[Batch]]]:
        """The batches, those of the same lanes together."""
        groups: list[tuple[Lanes, list[Batch]]] = []
        for batch in self.batches:
            if not groups or groups[-1][0] is not batch.lanes:
                groups.append((batch.lanes, []))
            groups[-1][1].append(batch)
        return groups
