"""Workers: threads that carry values between host memory and a tier that is slower than it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import ref

from torch import Tensor

from recollect._core.errors import TierFullError
from recollect._offload.accounts import Accounts
from recollect._offload.host_memory import aligned_bytes
from recollect._offload.jobs import ReadJob, WriteJob
from recollect._offload.notices import Notices
from recollect._offload.parcels import Parcel
from recollect._offload.pinned import Buffer
from recollect._offload.tiers import HostTier, Tier

_WORKERS = 4


class Workers:
    """Write parcels to a tier and read them back. Callers hold the lock of the session.

    Attributes:
        tier: the slower one.
    """

    def __init__(self, tier: Tier, staging: HostTier, in_flight: int, notices: Notices) -> None:
        self.tier = tier
        self._staging, self._in_flight, self._notices = staging, in_flight, notices
        self._threads: ThreadPoolExecutor | None = None
        self._writing: deque[tuple[WriteJob, int]] = deque()

    def take_staging(self, size: int, accounts: Accounts) -> Buffer:
        """A buffer for the way to or from the tier; waits while too much is on that way."""
        while self._writing and (
            self._writing[0][0].future.done() or sum(length for _, length in self._writing) + size > 2 * self._in_flight
        ):
            start = time.perf_counter()
            self._writing.popleft()[0].future.result()
            accounts.note_host_stall(time.perf_counter() - start)
        buffer = self._staging.pool.take(size)
        assert buffer is not None
        return buffer

    def write(self, parcel: Parcel, data: Tensor, mark: Any, buffer: Buffer | None, accounts: Accounts) -> None:
        """Begin to write bytes, once a mark is reached; a buffer is given back when they are written."""
        job = parcel.written = WriteJob(self.tier)
        job.future = self._submit(self._run_write, job, data, mark, buffer, ref(parcel), accounts)
        self._writing.append((job, parcel.kind.travel_bytes))

    def _run_write(  # noqa: PLR0917
        self,
        job: WriteJob,
        data: Tensor,
        mark: Any,
        buffer: Buffer | None,
        whose: Callable[[], Parcel | None],
        accounts: Accounts,
    ) -> None:
        """On a worker's thread: write, and let go of what held the bytes until now."""
        start = time.perf_counter()
        try:
            if mark is not None:
                mark.synchronize()
            key = self.tier.write(data)
        except Exception as error:  # whatever a tier raises, the value is still where it was
            job.failure = "is full" if isinstance(error, TierFullError) else f"failed: {error}"
            parcel = whose()
            if parcel is not None:
                self._keep_after_failure(parcel, job.failure)
            return
        accounts.note_written(data.numel(), time.perf_counter() - start)
        job.arrive(key)
        del data
        parcel = whose()
        if buffer is not None:
            if job.leave():
                if parcel is not None:
                    parcel.buffer = None
                buffer.give_back()
        elif parcel is not None:
            alias = parcel.alias
            if alias is not None and alias._version != parcel.version:  # noqa: SLF001
                parcel.is_changed = True
            parcel.alias = None

    def _keep_after_failure(self, parcel: Parcel, reason: str) -> None:
        if parcel.lanes is None:
            parcel.stays = True
        self._notices.note_warning(
            "slow",
            f"tier '{self.tier.name}' {reason}. {parcel} stays in memory, and so does everything else that does "
            "not fit there.\n"
            "Make room, raise `limit`, or name another `directory`.",
        )

    def read(self, parcel: Parcel, accounts: Accounts) -> ReadJob:
        """Begin to read a parcel back into host memory."""
        size = parcel.kind.travel_bytes
        buffer = None if parcel.lanes is None else self.take_staging(size, accounts)
        data = aligned_bytes(size) if buffer is None else buffer.bytes
        job = parcel.reading = ReadJob(data, buffer)
        assert parcel.written is not None
        marks = () if buffer is None else buffer.busy
        job.future = self._submit(self._run_read, parcel.written, data[:size], marks, accounts)
        return job

    @staticmethod
    def _run_read(written: WriteJob, into: Tensor, marks: Any, accounts: Accounts) -> None:
        """On a worker's thread."""
        for mark in marks:
            mark.synchronize()
        start = time.perf_counter()
        written.read(into)
        accounts.note_read(into.numel(), time.perf_counter() - start)

    @staticmethod
    def abandon(reading: ReadJob) -> None:
        """Nobody wants what is being read."""
        buffer = reading.buffer
        if buffer is not None:
            kept = buffer
            reading.future.add_done_callback(lambda _: kept.give_back())

    def _submit(self, fn: Callable[..., None], *args: Any) -> Future[None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="recollect-offload")
        return self._threads.submit(fn, *args)
