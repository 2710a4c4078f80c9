"""Transfers: every copy out and back, and every mark that says how far one is.

The way out is in `sending`. What comes back is allocated on the computing stream, and the copy waits for the point
where that was done, so that its memory, too, is used in the very order of that stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from torch import Tensor

from recollect._core.errors import OffloadError
from recollect._core.offload_news import Move, listeners
from recollect._offload.copies import Loading
from recollect._offload.jobs import ReadJob
from recollect._offload.parcels import Parcel
from recollect._offload.pinned import Buffer
from recollect._offload.sending import Sender
from recollect._offload.streams import Batch, Lanes
from recollect._offload.workers import Workers


class Transfers(Sender):
    """Sends parcels away and brings them back. Callers hold the lock of the session."""

    def fetch(self, parcels: Iterable[Parcel], *, waits: bool = False) -> None:
        """Begin the way back of those that are away.

        What a slower tier has not given back yet is only asked for, unless `waits`.
        """
        loading = Loading(self.accounts.back_times)
        staged: list[tuple[Parcel, Buffer]] = []  # which are free again after the copy
        for parcel in parcels:
            if parcel.alias is not None or parcel.returned is not None:
                continue
            if self._workers is not None and not self._is_at_hand(parcel, self._workers) and not waits:
                continue
            buffer, lanes, reading = parcel.buffer, parcel.lanes, parcel.reading
            if reading is not None:
                buffer = self._finish_reading(parcel, reading)
                if buffer is not None:
                    staged.append((parcel, buffer))
            if lanes is None:
                self._bring_to_host(parcel, reading)
            elif buffer is not None:  # else it was changed before it had left
                loading.add_back(parcel, lanes, buffer)
        try:
            for lanes, batches in loading.by_lanes():
                self._copy_back(lanes, batches)
        finally:
            for parcel, buffer in staged:
                buffer.give_back(parcel.back)

    def _is_at_hand(self, parcel: Parcel, workers: Workers) -> bool:
        """Whether the bytes are in host memory and stay there; if not, a slower tier is asked for them."""
        if parcel.reading is None and parcel.buffer is not None:
            written = parcel.written
            if written is None or written.failure or written.claim():
                return True
        if parcel.is_changed:
            return False
        reading = parcel.reading or workers.read(parcel, self.accounts)
        return parcel.lanes is not None and reading.future.done()

    def _copy_back(self, lanes: Lanes, batches: Sequence[Batch]) -> None:
        try:
            lanes.copy_back(batches)
        except RuntimeError as error:
            whose = next(batch.parcels[batch.begun] for batch in batches if batch.begun < len(batch.parcels))
            raise OffloadError(self._describe(whose, "could not be copied back", error)) from error
        finally:
            for batch in batches:
                self._note_returning(batch)

    def _note_returning(self, batch: Batch) -> None:
        end, stream, size = batch.end, batch.stream, 0
        for parcel, target in zip(batch.parcels[: batch.begun], batch.targets, strict=False):
            parcel.back, parcel.returned, parcel.stream, parcel.met = end, target, stream, None
            size += parcel.kind.travel_bytes
            if listeners.present:
                self._tell(Move.RETURNS, parcel, target.untyped_storage())
        self.accounts.back_bytes += size

    def _bring_to_host(self, parcel: Parcel, reading: ReadJob | None) -> None:
        kind = parcel.kind
        if reading is not None:
            data = reading.bytes[: kind.travel_bytes]
        else:
            assert parcel.buffer is not None
            data = parcel.buffer.bytes.clone()  # what is in a buffer of the pool must not outlive the parcel
        if kind.codec is not None:
            data = kind.codec.decode(data, kind.size)
        parcel.returned = kind.over(data) if kind.is_dense else data
        self.accounts.back_bytes += kind.travel_bytes
        if listeners.present:
            self._tell(Move.RETURNS, parcel, data.untyped_storage())

    def _finish_reading(self, parcel: Parcel, reading: ReadJob) -> Buffer | None:
        """Wait for what a slower tier gives back; gives the buffer that it is in, if it goes on to a device."""
        parcel.reading = None
        start = time.perf_counter()
        try:
            reading.future.result()
        except Exception as error:
            if reading.buffer is not None:
                reading.buffer.give_back()
            raise OffloadError(self._describe(parcel, "could not be read back", error)) from error
        if parcel.lanes is None:
            self.accounts.note_stall(self.host_clock, start, time.perf_counter())
        else:
            self.accounts.note_host_stall(time.perf_counter() - start)
        return reading.buffer

    def take(self, parcel: Parcel) -> tuple[Tensor, int]:
        """Memory with the value in it, and which byte of the original its storage begins with; the stream waits.

        Raises:
            OffloadError: it cannot be had back.
            ChangedInputError: it was written into before it had left.
        """
        alias = parcel.alias
        if parcel.is_changed or alias is not None:
            parcel.check()
        if alias is not None:  # it stayed, or is still on its way out: the way back is saved
            return alias, 0
        if parcel.returned is None:
            self.fetch((parcel,), waits=True)
        returned = parcel.returned
        assert returned is not None
        if listeners.present:
            self._tell(Move.IS_BACK, parcel, None)
        lanes = parcel.lanes
        if lanes is None:
            return returned, parcel.kind.start - int(returned.storage_offset()) * returned.itemsize
        stream = lanes.current()
        if stream is not parcel.met:
            self._hold(lanes, stream, parcel.back)
            parcel.met = stream
            if stream != parcel.stream:
                returned.record_stream(stream)
        return returned, parcel.kind.start

    @staticmethod
    def drop_returned(parcel: Parcel) -> None:
        """Hold what came back no longer: the backward pass has it, or does not want it."""
        returned, parcel.returned = parcel.returned, None
        if returned is not None and parcel.back is not None and parcel.asked > 0:
            parcel.lanes.lend(returned, is_out=False)  # type: ignore[union-attr]

    def forget(self, parcel: Parcel) -> None:
        """A parcel dies, wherever: in any thread, also in the midst of other work here. Takes no lock."""
        lanes = parcel.lanes
        if parcel.is_leaving:
            self._left_early.append(parcel.kind.size)
            alias = parcel.alias
            if alias is not None and parcel.out is not None and lanes is not None:
                lanes.lend(alias, is_out=True)
        if parcel.returned is not None and parcel.back is not None and parcel.asked > 0 and lanes is not None:
            lanes.lend(parcel.returned, is_out=False)
        if parcel.reading is not None:
            Workers.abandon(parcel.reading)
        written = parcel.written
        if written is not None:
            written.forget()
        if parcel.buffer is not None and (written is None or written.failure or written.claim()):
            parcel.buffer.give_back(parcel.out if parcel.back is None else parcel.back)
