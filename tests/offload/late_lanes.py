"""Lanes of a device that does not exist: copies happen as late as they may, and memory is spoilt as soon as it may be.

Host tensors play the device's. A copy is done when somebody waits for its mark, not before; so whoever reads without
waiting reads garbage. What a stream let go of before its copy was done is spoilt, as if others had been given it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect._offload.accounts import Accounts
from recollect._offload.compression import Compression
from recollect._offload.kinds import bytes_of
from recollect._offload.learning import SessionOptions
from recollect._offload.session import Session
from recollect._offload.streams import Batch, Mark, StreamClock
from recollect._offload.tiers import HostTier, Tier
from recollect._offload.transfers import Transfers

GARBAGE = 0xA5


def spoil(tensor: Tensor) -> None:
    """Fill the memory of a tensor that lies in one piece with garbage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    bytes_of(tensor.untyped_storage(), start, tensor.nbytes).fill_(GARBAGE)


class LateMark:
    """The end of a copy, which is made when it is waited for. Copies of one lane are made in their order."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._lock = threading.RLock()  # workers wait for marks, too

    def synchronize(self) -> None:
        with self._lock:
            if self._work is not None:
                self._work()
            self._work = None

    @property
    def is_done(self) -> bool:
        return self._work is None


class CountingClock:
    """A clock that ticks when it is looked at: a microsecond each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self, stream: Any) -> Mark:
        self.now += 1e-6
        return self.now

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, LateMark):
            mark.synchronize()

    def is_past(self, mark: Mark) -> bool:
        return mark.is_done if isinstance(mark, LateMark) else True

    def seconds(self, start: Mark, end: Mark) -> float:
        between: float = end - start
        return between


class LateLanes:
    """What `DeviceLanes` does, as late as it may be done."""

    def __init__(self, device: torch.device) -> None:
        self.clock: StreamClock = CountingClock()
        self._out: list[LateMark] = []
        self._back: list[LateMark] = []
        self.held: list[Mark] = []
        self.lent: list[Tensor] = []
        self.outs = self.backs = 0
        self.copy_s = 1e-6
        self.stall_s = 0.0
        self.fails: str = ""

    @staticmethod
    def current() -> str:
        return "the only stream"

    def copy_out(self, batches: Sequence[Batch]) -> None:
        if self.fails == "out":
            raise RuntimeError("the device fell off the bus")
        for batch in batches:
            self.outs += len(batch.targets)
            if all(mark.is_done for mark in batch.after):  # else somebody may still read there
                for target in batch.targets:
                    spoil(target)
            self._queue(self._out, batch)

    def copy_back(self, batches: Sequence[Batch]) -> None:
        if self.fails == "back":
            raise RuntimeError("the device fell off the bus")
        for batch in batches:
            self.backs += len(batch.targets)
            for target in batch.targets:
                spoil(target)
            self._queue(self._back, batch)

    def _queue(self, lane: list[LateMark], batch: Batch) -> None:
        before = list(lane)
        copies = list(zip(batch.targets, batch.sources, strict=True))
        after, through = list(batch.after), batch.through

        def work() -> None:
            for earlier in [*before, *after]:
                earlier.synchronize()
            for target, source in copies:
                target.copy_(source if through is None else through(source))

        batch.begun, batch.end = len(copies), LateMark(work)
        lane.append(batch.end)
        if batch.times is not None:
            batch.times.append((batch.targets[0].nbytes, 0.0, self.copy_s))

    def hold(self, stream: Any, mark: LateMark) -> None:
        self.held.append(mark)
        assert isinstance(self.clock, CountingClock)
        self.clock.now += self.stall_s
        mark.synchronize()

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        self.lent.append(tensor)


def late_session(
    *,
    host: HostTier | None = None,
    slow: Tier | None = None,
    min_bytes: int = 0,
    in_flight: int = 2**30,
    waits: bool = True,
    compress: str | None = None,
) -> tuple[Session, LateLanes]:
    """A session on such a device, and its lanes."""
    host = HostTier() if host is None and slow is None else host
    lanes = LateLanes(torch.device("cpu"))
    transfers = Transfers(
        host=host,
        slow=slow,
        staging=HostTier(),
        in_flight=in_flight,
        accounts=Accounts(measures=False),
        make_lanes=lambda device: lanes,
    )
    options = SessionOptions(min_bytes=min_bytes, in_flight=in_flight, waits=waits, compression=Compression(compress))
    return Session("host", options, transfers), lanes
