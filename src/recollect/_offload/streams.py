"""The lanes on which bytes leave a device and come back: one stream each way, beside the one that computes.

The host never waits here. A copy begins when the computing stream has reached the point where it was asked for; the
computing stream waits for a copy only where it is told to. Times are read from events, later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any
"""A point in a stream's work, to wait for or to tell the time by: an event, or seconds where there are no streams."""


Times = list[tuple[int, Mark, Mark]]
"""Bytes, start and end of copies."""


class Lanes(Protocol):
    """The ways between a device and host memory; tests have their own, on which copies come late.

    Attributes:
        clock: tells the time of streams.
    """

    clock: Clock

    def current(self) -> Any:
        """The stream that computes on this thread now."""

    def copy_out(self, copy: Copy) -> Mark:
        """Copy to the host; gives the mark of its end."""

    def copy_back(self, copy: Copy) -> Mark:
        """Copy to the device; gives the mark of its end."""

    def hold(self, stream: Any, mark: Mark) -> None:
        """Let all that `stream` does from here on wait for a mark."""

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        """Keep a tensor's memory from being used again until what a lane does now is done."""


class Copy:
    """What a lane is to do.

    Attributes:
        target: where the bytes go.
        source: where they are.
        stream: must have come to this point first: it made the source, or had the target's memory before.
        after: marks that must have been reached first.
        through: what the bytes pass through on the way, on the device.
        times: where to note the time, if it is wanted.
    """

    __slots__ = ("after", "source", "stream", "target", "through", "times")

    def __init__(self, target: Tensor, source: Tensor, stream: Any, after: Sequence[Mark], times: Times | None) -> None:
        self.target, self.source, self.stream, self.after, self.times = target, source, stream, after, times
        self.through: Callable[[Tensor], Tensor] | None = None


class DeviceLanes:
    """The lanes of an accelerator.

    Attributes:
        clock: tells the time of its streams.
    """

    __slots__ = ("_back", "_device", "_here", "_out", "clock")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)
        self.clock: Clock = DeviceClock(device)
        # Waiting for an event means waiting for what it was recorded on last, so one serves all copies: whoever uses
        # the lanes holds the lock of their owner.
        self._here = torch.Event(device)

    def current(self) -> torch.Stream:
        """The stream that computes on this thread now."""
        return torch.accelerator.current_stream(self._device)

    def copy_out(self, copy: Copy) -> Mark:
        """Copy to the host, on a stream of its own."""
        self._meet(self._out, copy)
        with self._out:
            start = copy.times is not None and self.clock.mark(self._out)
            source = copy.source if copy.through is None else copy.through(copy.source)
            copy.target.copy_(source, non_blocking=True)
            return self._end(self._out, copy, start)

    def copy_back(self, copy: Copy) -> Mark:
        """Copy to the device, on a stream of its own. The target is of the computing stream's memory."""
        self._meet(self._back, copy)
        with self._back:
            start = copy.times is not None and self.clock.mark(self._back)
            if copy.through is None:
                copy.target.copy_(copy.source, non_blocking=True)
            else:
                copy.target.copy_(copy.through(copy.source.to(self._device, non_blocking=True)))
            return self._end(self._back, copy, start)

    def _meet(self, lane: torch.Stream, copy: Copy) -> None:
        self._here.record(copy.stream)
        lane.wait_event(self._here)
        for mark in copy.after:
            lane.wait_event(mark)

    def _end(self, lane: torch.Stream, copy: Copy, start: Mark) -> Mark:
        if copy.times is None:
            return lane.record_event()
        end = self.clock.mark(lane)
        copy.times.append((copy.target.numel(), start, end))
        return end

    def hold(self, stream: Any, mark: Mark) -> None:
        """Let a stream wait for a mark."""
        stream.wait_event(mark)

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        """Tell the allocator that a lane uses a tensor."""
        tensor.record_stream(self._out if is_out else self._back)


class Clock(Protocol):
    """Tells the time of a stream's work."""

    def mark(self, stream: Any) -> Mark:
        """This point of a stream's work."""

    def wait(self, mark: Mark) -> None:
        """Block until a mark is reached."""

    def is_past(self, mark: Mark) -> bool:
        """Whether a mark has been reached."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two marks that have been reached."""


class DeviceClock:
    """Time on an accelerator, by events."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, stream: Any) -> Mark:
        """Record an event."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Block until an event has happened."""
        mark.synchronize()

    def is_past(self, mark: Mark) -> bool:
        """Whether an event has happened."""
        past: bool = mark.query()
        return past

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two events."""
        between_ms: float = start.elapsed_time(end)
        return between_ms / 1e3


class HostClock:
    """Time on a machine without streams: the host's."""

    __slots__ = ()

    def mark(self, stream: Any) -> Mark:
        """Now."""
        del stream
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        """Every mark has been reached."""

    def is_past(self, mark: Mark) -> bool:
        """Every mark has been reached."""
        del mark
        return True

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two times."""
        between: float = end - start
        return between


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's stream is being captured into a graph, where nothing can be sent away."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
