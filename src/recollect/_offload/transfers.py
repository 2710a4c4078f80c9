"""Transfers: every copy out and back, and every mark that says how far one is.

The memory of what was sent is let go by `release`: the stream that computed waits there for the copy, and the tensor is
dropped at once. So the allocator may use it again in the very order of that stream, however far the host is ahead; by
`record_stream` it would come free only when the host looks, which is too late for the peak. For the same reason what
comes back is allocated on the computing stream, and the copy waits for the point where that was done.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.errors import OffloadError, TierFullError
from recollect._core.travel import Move, News, listeners
from recollect._core.units import format_bytes
from recollect._offload.accounts import Accounts
from recollect._offload.jobs import ReadJob, WriteJob
from recollect._offload.parcels import Parcel, bytes_of
from recollect._offload.pinned import Buffer, aligned_bytes
from recollect._offload.streams import Copy, DeviceLanes, HostClock, Lanes
from recollect._offload.tiers import HostTier, Tier

_WORKERS = 4


class Transfers:
    """Sends parcels away and brings them back. Callers hold the lock of the session.

    Attributes:
        host: pinned memory for values; None if all go on to the slower tier.
        slow: the tier behind it, if there is one.
        in_flight: most bytes that are on their way to or from a slower tier.
        leaving_bytes: on their way out, and still on the device.
        accounts: what happened, in numbers.
    """

    def __init__(
        self,
        *,
        host: HostTier | None,
        slow: Tier | None,
        staging: HostTier,
        in_flight: int,
        accounts: Accounts,
        make_lanes: Callable[[torch.device], Lanes] = DeviceLanes,
    ) -> None:
        self.host, self.slow, self._staging = host, slow, staging
        self.in_flight, self.accounts = in_flight, accounts
        self._make_lanes = make_lanes
        self._lanes: dict[torch.device, Lanes] = {}
        self._without_lanes: set[torch.device] = set()
        self._workers: ThreadPoolExecutor | None = None
        self._writing: deque[tuple[WriteJob, int]] = deque()
        self._left_early: deque[int] = deque()  # sizes of parcels that died on their way out
        self._leaving_bytes = 0
        self.host_clock = HostClock()
        self.copies_host = False
        self._said: set[str] = set()
        self._news: deque[str] = deque()

    @property
    def leaving_bytes(self) -> int:
        """On their way out, and still where they were."""
        while self._left_early:
            self._leaving_bytes -= self._left_early.popleft()
        return self._leaving_bytes

    def lanes_of(self, device: torch.device) -> Lanes:
        """The lanes of a device."""
        lanes = self._lanes.get(device)
        if lanes is None:
            lanes = self._lanes[device] = self._make_lanes(device)
        return lanes

    def has_lanes(self, device: torch.device) -> bool:
        """Whether values of a device can travel: one without streams has no lanes, and its values stay."""
        if device in self._lanes or self.is_on_host(device):
            return True
        if device not in self._without_lanes:
            try:
                self.lanes_of(device)
            except (RuntimeError, NotImplementedError) as error:
                self._without_lanes.add(device)
                self._say(
                    f"{device}", f"values on {device} stay there: copies beside its work are not possible ({error})"
                )
        return device not in self._without_lanes

    def is_on_host(self, device: torch.device) -> bool:
        """Whether values there are in host memory by nature, with no lanes to travel on."""
        return device.type == "cpu" and self._make_lanes is DeviceLanes

    # Out.

    def send(self, parcel: Parcel) -> None:
        """Begin the way out. A value for which there is no room stays."""
        alias = parcel.alias
        if alias is None:
            return
        if alias._version != parcel.version:  # noqa: SLF001
            parcel.is_changed, parcel.alias = True, None
            return
        flat = bytes_of(alias.untyped_storage(), parcel.start, parcel.size)
        try:
            if parcel.is_on_host:
                self._send_from_host(parcel, flat)
            else:
                self._send_from_device(parcel, flat)
        except RuntimeError as error:
            parcel.stays = True
            raise OffloadError(self._describe(parcel, "could not be copied out", error)) from error

    def _send_from_device(self, parcel: Parcel, flat: Tensor) -> None:
        buffer = None if self.host is None else self.host.pool.take(parcel.travel_bytes)
        is_slow = buffer is None and self.slow is not None
        if is_slow:
            buffer = self._take_staging(parcel.travel_bytes)
        if buffer is None:
            parcel.stays = True
            self._stays_for_lack(parcel)
            return
        lanes: Lanes = parcel.lanes
        copy = Copy(buffer.bytes, flat, parcel.stream, buffer.busy, self.accounts.out_times)
        if parcel.codec is not None:
            copy.through = parcel.codec.encode
        try:
            parcel.out = lanes.copy_out(copy)
        except BaseException:
            self._give_back(buffer, None)
            raise
        parcel.buffer = buffer
        self._note_leaving(parcel)
        if is_slow:
            self._write(parcel, buffer.bytes, parcel.out, buffer)

    def _send_from_host(self, parcel: Parcel, flat: Tensor) -> None:
        if parcel.codec is not None:
            flat = parcel.codec.encode(flat)
        if self.slow is not None:
            self._note_leaving(parcel)
            self._write(parcel, flat, None, None)
            return
        assert self.host is not None
        if not self.copies_host:
            parcel.stays = True
            self._say(
                "host",
                "values that are in host memory already stay where they are: sending them to the host tier would free "
                "nothing.\nOn a machine without an accelerator use the disk tier: recollect.offload(tier='disk').",
            )
            return
        try:
            parcel.buffer = self.host.write(flat)
        except TierFullError:
            parcel.stays = True
            self._stays_for_lack(parcel)
            return
        self.accounts.note_out(parcel.travel_bytes)
        parcel.alias = None

    def _note_leaving(self, parcel: Parcel) -> None:
        parcel.is_leaving = True
        if listeners:
            assert parcel.alias is not None
            self._tell(Move.LEAVES, parcel, parcel.alias.untyped_storage())
        self._leaving_bytes += parcel.size
        self.accounts.note_out(parcel.travel_bytes)

    def release(self, parcel: Parcel) -> None:
        """Let go of the memory of a value that is on its way out; what comes after it waits for the copy."""
        alias = parcel.alias
        if not parcel.is_leaving or alias is None:
            return
        if parcel.is_on_host:
            assert parcel.written is not None
            start = time.perf_counter()
            parcel.written.future.result()
            self.accounts.note_stall(self.host_clock, start, time.perf_counter())
            self._end_leaving(parcel)
            return
        lanes: Lanes = parcel.lanes
        # Waits and frees on the stream on which the value was saved: where its memory may be freed in plain training.
        self._hold(lanes, parcel.stream, parcel.out)
        if alias._version != parcel.version:  # noqa: SLF001
            parcel.is_changed = True
        parcel.alias = None
        self._end_leaving(parcel)

    def _tell(self, move: Move, parcel: Parcel, storage: torch.UntypedStorage | None) -> None:
        name = self.slow.name if self.slow is not None and parcel.written is not None else "host"
        listeners.tell(News(move=move, value=id(parcel), storage=storage, bytes=parcel.travel_bytes, tier=name))

    def _hold(self, lanes: Lanes, stream: Any, mark: Any) -> None:
        if self.accounts.measures:
            before = lanes.clock.mark(stream)
            lanes.hold(stream, mark)
            self.accounts.note_stall(lanes.clock, before, lanes.clock.mark(stream))
        else:
            lanes.hold(stream, mark)

    def _end_leaving(self, parcel: Parcel) -> None:
        if parcel.is_leaving:
            parcel.is_leaving = False
            self._leaving_bytes -= parcel.size
            if listeners:
                self._tell(Move.HAS_LEFT, parcel, None)

    def note_written(self, parcel: Parcel) -> None:
        """A value of the host whose write may be done meanwhile: count it out."""
        if parcel.is_leaving and parcel.alias is None:
            self._end_leaving(parcel)

    # Back.

    def fetch(self, parcel: Parcel) -> None:
        """Begin the way back, if it is away."""
        if parcel.alias is not None or parcel.returned is not None or parcel.is_changed:
            return
        if not self._is_in_host_memory(parcel):
            reading = parcel.reading or self._read(parcel)
            if parcel.is_on_host or not reading.future.done():
                return
        self._bring(parcel)

    def _is_in_host_memory(self, parcel: Parcel) -> bool:
        """Whether the bytes are in a buffer, and stay there until the parcel lets go of it."""
        if parcel.reading is not None or parcel.buffer is None:
            return False
        written = parcel.written
        return written is None or bool(written.failure) or written.claim()

    def _bring(self, parcel: Parcel) -> None:
        """From host memory to where it was."""
        reading, parcel.reading = parcel.reading, None
        if reading is not None:
            self._finish_reading(parcel, reading)
            data = reading.bytes[: parcel.travel_bytes]
        else:
            assert parcel.buffer is not None
            data = parcel.buffer.bytes
        if parcel.is_on_host:
            # What is in a buffer of the pool must not outlive the parcel.
            data = data.clone() if reading is None else data
            parcel.returned = data if parcel.codec is None else parcel.codec.decode(data, parcel.size)
            self.accounts.note_back(parcel.travel_bytes)
            if listeners:
                self._tell(Move.RETURNS, parcel, parcel.returned.untyped_storage())
            return
        lanes: Lanes = parcel.lanes
        stream = lanes.current()
        target = torch.empty(parcel.size, dtype=torch.uint8, device=parcel.device)
        copy = Copy(target, data, stream, () if parcel.out is None else (parcel.out,), self.accounts.back_times)
        if parcel.codec is not None:
            decode, size = parcel.codec.decode, parcel.size
            copy.through = lambda small: decode(small, size)
        try:
            parcel.back = lanes.copy_back(copy)
        except RuntimeError as error:
            raise OffloadError(self._describe(parcel, "could not be copied back", error)) from error
        parcel.returned, parcel.stream = target, stream
        self.accounts.note_back(parcel.travel_bytes)
        if listeners:
            self._tell(Move.RETURNS, parcel, target.untyped_storage())
        if reading is not None and reading.buffer is not None:
            self._give_back(reading.buffer, parcel.back)

    def _finish_reading(self, parcel: Parcel, reading: ReadJob) -> None:
        start = time.perf_counter()
        try:
            reading.future.result()
        except Exception as error:
            if reading.buffer is not None:
                self._give_back(reading.buffer, None)
            raise OffloadError(self._describe(parcel, "could not be read back", error)) from error
        if parcel.is_on_host:
            self.accounts.note_stall(self.host_clock, start, time.perf_counter())
        else:
            self.accounts.note_host_stall(time.perf_counter() - start)

    def take(self, parcel: Parcel) -> tuple[torch.UntypedStorage, int]:
        """A storage with the value in it, and which byte of the original it begins with; the current stream waits.

        Raises:
            OffloadError: it cannot be had back.
            ChangedInputError: it was written into before it had left.
        """
        alias = parcel.alias
        parcel.check()
        if alias is not None:  # it stayed, or is still on its way out: the way back is saved
            return alias.untyped_storage(), 0
        self.fetch(parcel)
        if parcel.returned is None:
            self._bring(parcel)
        returned = parcel.returned
        assert returned is not None
        if listeners:
            self._tell(Move.IS_BACK, parcel, None)
        if parcel.back is not None:
            lanes: Lanes = parcel.lanes
            stream = lanes.current()
            self._hold(lanes, stream, parcel.back)
            if stream != parcel.stream:
                returned.record_stream(stream)
        start = int(returned.storage_offset())
        return returned.untyped_storage(), parcel.start - start

    def drop_returned(self, parcel: Parcel) -> None:
        """Hold what came back no longer: the backward pass has it, or does not want it."""
        returned, parcel.returned = parcel.returned, None
        if returned is not None and parcel.back is not None and parcel.asked > 0:
            parcel.lanes.lend(returned, is_out=False)

    def forget(self, parcel: Parcel) -> None:
        """A parcel dies, wherever: in any thread, also in the midst of other work here. Takes no lock."""
        if parcel.is_leaving:
            self._left_early.append(parcel.size)
            alias = parcel.alias
            if alias is not None and parcel.out is not None:
                parcel.lanes.lend(alias, is_out=True)
        if parcel.returned is not None and parcel.back is not None and parcel.asked > 0:
            parcel.lanes.lend(parcel.returned, is_out=False)
        if parcel.reading is not None:
            self._abandon(parcel.reading)
        written = parcel.written
        if written is not None:
            written.forget()
        if parcel.buffer is not None and (written is None or written.failure or written.claim()):
            self._give_back(parcel.buffer, parcel.out if parcel.back is None else parcel.back)

    # Slower tiers.

    def _write(self, parcel: Parcel, data: Tensor, mark: Any, buffer: Buffer | None) -> None:
        assert self.slow is not None
        job = parcel.written = WriteJob(self.slow)
        job.future = self._submit(self._run_write, job, data, mark, buffer, ref(parcel))
        self._writing.append((job, parcel.travel_bytes))

    def _run_write(
        self, job: WriteJob, data: Tensor, mark: Any, buffer: Buffer | None, whose: Callable[[], Parcel | None]
    ) -> None:
        """On a worker's thread: write, and let go of what held the bytes until now."""
        assert self.slow is not None
        start = time.perf_counter()
        try:
            if mark is not None:
                mark.synchronize()
            key = self.slow.write(data)
        except Exception as error:  # whatever a tier raises, the value is still where it was
            job.failure = "is full" if isinstance(error, TierFullError) else f"failed: {error}"
            parcel = whose()
            if parcel is not None:
                self._keep_after_failure(parcel, job.failure)
            return
        self.accounts.note_written(data.numel(), time.perf_counter() - start)
        job.arrive(key)
        del data
        parcel = whose()
        if buffer is not None:
            if job.leave():
                if parcel is not None:
                    parcel.buffer = None
                self._give_back(buffer, None)
        elif parcel is not None:
            alias = parcel.alias
            if alias is not None and alias._version != parcel.version:  # noqa: SLF001
                parcel.is_changed = True
            parcel.alias = None

    def _keep_after_failure(self, parcel: Parcel, reason: str) -> None:
        assert self.slow is not None
        if parcel.is_on_host:
            parcel.stays = True
        self._say(
            "slow",
            f"tier '{self.slow.name}' {reason}. {parcel} stays in memory, and so does whatever finds no room there.\n"
            "Make room, raise `limit`, or name another `directory`.",
        )

    def _read(self, parcel: Parcel) -> ReadJob:
        buffer = None if parcel.is_on_host else self._take_staging(parcel.travel_bytes)
        data = aligned_bytes(parcel.travel_bytes) if buffer is None else buffer.bytes
        job = parcel.reading = ReadJob(data, buffer)
        assert parcel.written is not None
        marks = () if buffer is None else buffer.busy
        job.future = self._submit(self._run_read, parcel.written, data[: parcel.travel_bytes], marks)
        return job

    def _run_read(self, written: WriteJob, into: Tensor, marks: Any) -> None:
        """On a worker's thread."""
        for mark in marks:
            mark.synchronize()
        start = time.perf_counter()
        written.read(into)
        self.accounts.note_read(into.numel(), time.perf_counter() - start)

    def _abandon(self, reading: ReadJob) -> None:
        buffer = reading.buffer
        if buffer is not None:
            kept = buffer
            reading.future.add_done_callback(lambda _: self._give_back(kept, None))

    def _submit(self, fn: Callable[..., None], *args: Any) -> Future[None]:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="recollect-offload")
        return self._workers.submit(fn, *args)

    def _take_staging(self, size: int) -> Buffer:
        """A buffer for the way to or from a slower tier; waits while too much is on that way."""
        while self._writing and (
            self._writing[0][0].future.done() or sum(length for _, length in self._writing) + size > 2 * self.in_flight
        ):
            start = time.perf_counter()
            self._writing.popleft()[0].future.result()
            self.accounts.note_host_stall(time.perf_counter() - start)
        buffer = self._staging.pool.take(size)
        assert buffer is not None
        return buffer

    @staticmethod
    def _give_back(buffer: Buffer, busy: Any) -> None:
        buffer.pool.give_back(buffer, busy)

    def _stays_for_lack(self, parcel: Parcel) -> None:
        assert self.host is not None
        limit = self.host.pool.limit
        text = "no more host memory" if limit is None else f"the host limit of {format_bytes(limit)} is reached"
        self._say(
            "limit",
            f"{text}: {parcel} stays on {parcel.device}, and so does whatever finds no room.\n"
            "Raise `limit`, or let the rest go to disk: tier=('host', 'disk').",
        )

    def _describe(self, parcel: Parcel, what: str, error: BaseException) -> str:
        name = self.slow.name if parcel.written is not None and self.slow is not None else "host"
        return f"{parcel} {what}, tier '{name}': {error}"

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._news.append(message)

    def say_news(self) -> None:
        """Warn of what happened meanwhile, also on workers' threads; once of each kind. Called without a lock."""
        while self._news:
            warnings.warn(self._news.popleft(), UserWarning, stacklevel=3)

    def close(self) -> None:
        """Wait for the workers, and let them go."""
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None
