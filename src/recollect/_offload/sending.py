"""Sends values away: begins the copies out, and lets go of memory once they are done.

The memory of what was sent is let go by `release`: the stream that computed waits there for the copy, and the tensor is
dropped at once. So the allocator may use it again in the very order of that stream, however far the host is ahead; by
`record_stream` it would come free only when the host looks, which is too late for the peak.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from recollect._core.errors import OffloadError, TierFullError
from recollect._core.offload_news import Move, News, listeners
from recollect._offload.accounts import Accounts
from recollect._offload.copies import Loading
from recollect._offload.device_lanes import LanesByDevice
from recollect._offload.kinds import Kind, bytes_of
from recollect._offload.notices import Notices
from recollect._offload.parcels import Parcel
from recollect._offload.pinned import Buffer
from recollect._offload.streams import Batch, DeviceLanes, HostClock, Lanes, Mark
from recollect._offload.tiers import HostTier, Tier
from recollect._offload.workers import Workers


class Sender:
    """Sends parcels away. Callers hold the lock of the session.

    Attributes:
        host: pinned memory for values; None if all go on to the slower tier.
        slow: the tier behind it, if there is one.
        leaving_bytes: on their way out, and still on the device.
        accounts: what happened, in numbers.
        notices: what is to be said to the user.
        turn: how many copies out were begun.
        copies_host: whether values that are in host memory already are copied there, in place of staying.
        host_clock: the time of values that are in host memory.
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
        self.host, self.slow, self._staging, self.accounts = host, slow, staging, accounts
        self.notices = Notices()
        self._workers = None if slow is None else Workers(slow, staging, in_flight, self.notices)
        self._lanes = LanesByDevice(make_lanes, self.notices)
        self._left_early: deque[int] = deque()  # sizes of parcels that died on their way out
        self._leaving_bytes = 0
        self.turn = 0
        self.host_clock = HostClock()
        self.copies_host = False

    @property
    def leaving_bytes(self) -> int:
        """On their way out, and still where they were."""
        while self._left_early:
            self._leaving_bytes -= self._left_early.popleft()
        return self._leaving_bytes

    def can_carry(self, kind: Kind) -> bool:
        """Whether values of a kind can travel: a device without streams has no lanes, and its values stay."""
        lanes = self._lanes.of(kind.device)
        kind.lanes = lanes or None
        return lanes is not False

    def send(self, parcels: Sequence[Parcel]) -> None:
        """Begin the way out. Values for which there is no room stay."""
        loading = Loading(self.accounts.out_times)
        pool = None if self.host is None else self.host.pool
        for parcel in parcels:
            alias = parcel.alias
            if alias is None:
                continue
            if parcel.lanes is None:
                self._send_from_host(parcel, alias)
                continue
            buffer = None if pool is None else pool.take(parcel.kind.travel_bytes)
            if buffer is None:
                buffer = self._find_stage(parcel)
                if buffer is None:
                    continue
            parcel.buffer = buffer
            loading.add_out(parcel, alias, buffer)
        for lanes, batches in loading.by_lanes():
            self._copy_out(lanes, batches)

    def _find_stage(self, parcel: Parcel) -> Buffer | None:
        """A buffer on the way to the slower tier, for a value that finds no room in host memory; None if it stays."""
        if self._workers is None:
            self._stays_for_lack(parcel)
            return None
        parcel.goes_on = True
        return self._workers.take_staging(parcel.kind.travel_bytes, self.accounts)

    def _copy_out(self, lanes: Lanes, batches: Sequence[Batch]) -> None:
        try:
            lanes.copy_out(batches)
        except BaseException as error:
            stayed = self._give_up(batches)
            if stayed is not None and isinstance(error, RuntimeError):
                raise OffloadError(self._describe(stayed, "could not be copied out", error)) from error
            raise
        finally:
            for batch in batches:
                self._note_leaving(batch)

    def _note_leaving(self, batch: Batch) -> None:
        end, turn, workers = batch.end, self.turn, self._workers
        begun = batch.parcels[: batch.begun]
        for parcel in begun:
            turn += 1
            parcel.out, parcel.turn, parcel.is_leaving = end, turn, True
            if parcel.goes_on and workers is not None and parcel.buffer is not None:
                workers.write(parcel, parcel.buffer.bytes, end, parcel.buffer, self.accounts)
        self.turn = turn
        self._count_leaving(begun)

    def _give_up(self, batches: Sequence[Batch]) -> Parcel | None:
        """What could not begin to leave stays; gives the first of it."""
        left = [(parcel, batch.end) for batch in batches for parcel in batch.parcels[batch.begun :]]
        for parcel, end in left:
            buffer, parcel.buffer = parcel.buffer, None
            self._stay(parcel)
            if buffer is not None:
                buffer.give_back(end)
        return left[0][0] if left else None

    def _send_from_host(self, parcel: Parcel, alias: Tensor) -> None:
        """What is in host memory by nature."""
        kind = parcel.kind
        if self._workers is None and not self.copies_host:
            self._stay(parcel)
            self.notices.add_in_host()
            return
        if alias._version != parcel.version:  # noqa: SLF001
            parcel.is_changed, parcel.alias = True, None
            return
        flat = bytes_of(alias.untyped_storage(), kind.start, kind.size)
        if kind.codec is not None:
            flat = kind.codec.encode(flat)
        if self._workers is not None:
            parcel.is_leaving = True
            self._count_leaving((parcel,))
            self._workers.write(parcel, flat, None, None, self.accounts)
            return
        assert self.host is not None
        try:
            parcel.buffer = self.host.write(flat)
        except TierFullError:
            self._stays_for_lack(parcel)
            return
        self.accounts.values += 1
        self.accounts.out_bytes += kind.travel_bytes
        parcel.alias = None

    def _count_leaving(self, parcels: Sequence[Parcel]) -> None:
        """These have just begun to leave."""
        accounts, size, travelling = self.accounts, 0, 0
        for parcel in parcels:
            kind = parcel.kind
            size += kind.size
            travelling += kind.travel_bytes
            parcel.step.leaving.append(parcel.number)
        self._leaving_bytes += size
        accounts.values += len(parcels)
        accounts.out_bytes += travelling
        if listeners.present:
            for parcel in parcels:
                if parcel.alias is not None:
                    self._tell(Move.LEAVES, parcel, parcel.alias.untyped_storage())

    def release(self, parcels: Iterable[Parcel]) -> None:
        """Let go of the memory of values that are on their way out; what comes after them waits for the copies."""
        last: Parcel | None = None
        size = 0
        gone: list[Tensor] = []  # not before the streams were told to wait: other threads may use the memory at once
        for parcel in parcels:
            if not parcel.is_leaving:
                continue
            alias = parcel.alias
            if alias is not None and parcel.lanes is None:
                self._wait_until_written(parcel)
            elif alias is not None:
                if alias._version != parcel.version:  # noqa: SLF001
                    parcel.is_changed = True
                # A lane carries one after the other, so waiting for the last is waiting for all.
                if last is not None and (last.stream is not parcel.stream or last.lanes is not parcel.lanes):
                    self._hold(last.lanes, last.stream, last.out)
                    last = None
                if last is None or parcel.turn > last.turn:
                    last = parcel
                # The stream on which the value was saved waits: there its memory may be freed in plain training.
                parcel.alias, parcel.met = None, parcel.stream
                gone.append(alias)
            parcel.is_leaving = False
            size += parcel.kind.size
            if listeners.present:
                self._tell(Move.HAS_LEFT, parcel, None)
        self._leaving_bytes -= size
        if last is not None:
            self._hold(last.lanes, last.stream, last.out)

    def _wait_until_written(self, parcel: Parcel) -> None:
        assert parcel.written is not None
        start = time.perf_counter()
        parcel.written.future.result()
        self.accounts.note_stall(self.host_clock, start, time.perf_counter())

    def _tell(self, move: Move, parcel: Parcel, storage: torch.UntypedStorage | None) -> None:
        size, tier = parcel.kind.travel_bytes, self._name_tier(parcel)
        listeners.tell(News(move=move, value=id(parcel), storage=storage, bytes=size, tier=tier))

    def _hold(self, lanes: Lanes | None, stream: object, mark: Mark) -> None:
        assert lanes is not None
        if self.accounts.measures:
            before = lanes.clock.mark(stream)
            lanes.hold(stream, mark)
            self.accounts.note_stall(lanes.clock, before, lanes.clock.mark(stream))
        else:
            lanes.hold(stream, mark)

    def note_written(self, parcel: Parcel) -> None:
        """A value of the host whose write may be done meanwhile: count it out."""
        if parcel.is_leaving and parcel.alias is None:
            parcel.is_leaving = False
            self._leaving_bytes -= parcel.kind.size
            if listeners.present:
                self._tell(Move.HAS_LEFT, parcel, None)

    def _stay(self, parcel: Parcel) -> None:
        parcel.stays = True
        self.accounts.stayed_bytes += parcel.kind.size

    def _stays_for_lack(self, parcel: Parcel) -> None:
        assert self.host is not None
        self._stay(parcel)
        self.notices.add_no_room(f"{parcel} stays on {parcel.kind.device}", limit=self.host.pool.limit)

    def _describe(self, parcel: Parcel, what: str, error: BaseException) -> str:
        return f"{parcel} {what}, tier '{self._name_tier(parcel)}': {error}"

    def _name_tier(self, parcel: Parcel) -> str:
        return self.slow.name if self.slow is not None and parcel.written is not None else "host"
