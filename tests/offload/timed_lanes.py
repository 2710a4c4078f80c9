"""Lanes and a computing stream in a time of their own: who computes says how long, and copies take what they take.

Host tensors play the device's. Copies are done at once; their marks are the times at which a device would have done
them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recollect._offload.accounts import Accounts
from recollect._offload.compression import Compression
from recollect._offload.learning import SessionOptions
from recollect._offload.session import Session
from recollect._offload.streams import Batch, Mark, StreamClock
from recollect._offload.tiers import HostTier
from recollect._offload.transfers import Transfers


class Time:
    """How far the computing stream is, and how long it waited."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0

    def mark(self, stream: Any) -> Mark:
        del stream
        return self.now_s

    def wait(self, mark: Mark) -> None:
        """The host may wait; the device does not care."""

    def is_past(self, mark: Mark) -> bool:
        return bool(mark <= self.now_s)

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)


class TimedLanes:
    """One lane each way, of a given speed."""

    def __init__(self, time: Time, bytes_per_s: float) -> None:
        self.clock: StreamClock = time
        self._time, self._speed = time, bytes_per_s
        self._out_s = self._back_s = 0.0

    @staticmethod
    def current() -> str:
        return "the only stream"

    def copy_out(self, batches: Sequence[Batch]) -> None:
        self._out_s = self._copy(batches, self._out_s)

    def copy_back(self, batches: Sequence[Batch]) -> None:
        self._back_s = self._copy(batches, self._back_s)

    def _copy(self, batches: Sequence[Batch], free_s: float) -> float:
        for batch in batches:
            start_s = max(free_s, self._time.now_s, *batch.after)
            free_s = batch.end = start_s + sum(target.nbytes for target in batch.targets) / self._speed
            for target, source in zip(batch.targets, batch.sources, strict=True):
                target.copy_(source)
            batch.begun = len(batch.targets)
            if batch.times is not None:
                batch.times.append((batch.targets[0].nbytes, start_s, free_s))
        return free_s

    def hold(self, stream: Any, mark: Mark) -> None:
        del stream
        self._time.waited_s += max(mark - self._time.now_s, 0.0)
        self._time.now_s = max(self._time.now_s, mark)

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        """Nothing here is used again too early."""


def make_timed_session(time: Time, bytes_per_s: float, *, waits: bool, in_flight: int = 2**30) -> Session:
    """A session of a device that is as far as `time` says."""

    def make_lanes(device: torch.device) -> TimedLanes:
        del device
        return TimedLanes(time, bytes_per_s)

    transfers = Transfers(
        host=HostTier(),
        slow=None,
        staging=HostTier(),
        in_flight=in_flight,
        accounts=Accounts(measures=False),
        make_lanes=make_lanes,
    )
    options = SessionOptions(min_bytes=0, in_flight=in_flight, waits=waits, compression=Compression(None))
    return Session("host", options, transfers)
