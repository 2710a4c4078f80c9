"""Lanes and a computing stream in a time of their own: who computes says how long, and copies take what they take.

Host tensors play the device's. Copies are done at once; their marks are the times at which a device would have done
them. Like a real lane, this one has one mark for small copies up to the next large one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recollect._offload.accounts import Accounts
from recollect._offload.compression import Compression
from recollect._offload.learning import SessionOptions
from recollect._offload.prefetch import TOGETHER
from recollect._offload.session import Session
from recollect._offload.streams import Clock, Copy, Mark
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
        self.clock: Clock = time
        self._time, self._speed = time, bytes_per_s
        self._out_s = self._back_s = 0.0

    @staticmethod
    def current() -> str:
        return "the only stream"

    def copy_out(self, copies: Sequence[Copy]) -> None:
        self._out_s = self._copy(copies, self._out_s)

    def copy_back(self, copies: Sequence[Copy]) -> None:
        self._back_s = self._copy(copies, self._back_s)

    def _copy(self, copies: Sequence[Copy], free_s: float) -> float:
        for copy in copies:
            start_s = max(free_s, self._time.now_s, *copy.after)
            free_s = copy.end = start_s + copy.target.nbytes / self._speed
            copy.target.copy_(copy.source)
            if copy.times is not None:
                copy.times.append((copy.target.nbytes, start_s, free_s))
        for before, after in zip(copies[-2::-1], copies[:0:-1], strict=True):
            if before.times is None and before.target.nbytes < TOGETHER:
                before.end = after.end
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
