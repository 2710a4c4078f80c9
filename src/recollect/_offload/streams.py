"""The lanes on which bytes leave a device and come back: one stream each way, beside the one that computes.

The host never waits here. A copy begins when the computing stream has reached the point where it was asked for; the
computing stream waits for a copy only where it is told to. Times are read from events, later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from recollect._core.torch_private.copies import copy_all
from recollect._core.torch_private.streams import stream_reader

if TYPE_CHECKING:
    from recollect._offload.parcels import Parcel

_MOST_EVENTS = 1024  # of a lane: while more copies are on their way, waits are longer than they need be

Mark = Any
"""A point in a stream's work, to wait for or to tell the time by: an event, or seconds where there are no streams."""


Times = list[tuple[int, Mark, Mark]]
"""Bytes, start and end of copies."""


class Lanes(Protocol):
    """The ways between a device and host memory; tests have their own, on which copies come late.

    Attributes:
        clock: tells the time of streams.
    """

    clock: StreamClock

    def current(self) -> Any:
        """The stream that computes on this thread now; the same object each time, if that can be."""

    def copy_out(self, batches: Sequence[Batch]) -> None:
        """Copy to the host, in this order; notes of each batch how many were begun, and the mark of their end."""

    def copy_back(self, batches: Sequence[Batch]) -> None:
        """Copy to the device, likewise."""

    def hold(self, stream: Any, mark: Mark) -> None:
        """Let all that `stream` does from here on wait for a mark."""

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        """Keep a tensor's memory from being used again until what a lane does now is done."""


class Batch:
    """Copies that a lane makes one after the other. They meet the computing stream once, and end at one mark.

    Attributes:
        lanes: that are to make them.
        stream: must have come to this point first: it made the sources, or had the targets' memory before.
        parcels: whose bytes they are; `targets` says where they go, `sources` where they are.
        after: marks that must have been reached first.
        times: where to note the time, if it is wanted. A batch that is timed has one copy.
        through: what the bytes pass through on the way, on the device. Such a batch has one copy, too.
        begun: how many copies are under way; fewer than all if one of them failed.
        end: the mark of their end, once some are under way.
    """

    __slots__ = ("after", "begun", "end", "lanes", "parcels", "sources", "stream", "targets", "through", "times")

    def __init__(
        self, lanes: Lanes, stream: Any, times: Times | None = None, through: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.lanes, self.stream, self.times, self.through = lanes, stream, times, through
        self.parcels: list[Parcel] = []
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.after: list[Mark] = []
        self.begun = 0
        self.end: Mark = None


class DeviceLanes:
    """The lanes of an accelerator. Whoever uses them holds the lock of their owner.

    Attributes:
        clock: tells the time of its streams.
        current: gives the stream that computes on this thread now.
    """

    __slots__ = ("_back", "_device", "_here", "_out", "clock", "current")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = _Lane(device), _Lane(device)
        self.clock: StreamClock = DeviceClock(device)
        self.current = stream_reader(device)
        # Waiting for an event means waiting for what it was recorded on last, so one serves all.
        self._here = torch.Event(device)

    def copy_out(self, batches: Sequence[Batch]) -> None:
        """Copy to the host, on a stream of its own."""
        self._copy(self._out, batches, is_out=True)

    def copy_back(self, batches: Sequence[Batch]) -> None:
        """Copy to the device, on a stream of its own. The targets are of the computing stream's memory."""
        self._copy(self._back, batches, is_out=False)

    def _copy(self, lane: _Lane, batches: Sequence[Batch], *, is_out: bool) -> None:
        self._meet(lane, batches)
        with lane.stream:
            for batch in batches:
                if batch.times is not None:
                    self._copy_timed(lane, batch, batch.times, is_out=is_out)
                    continue
                try:
                    self._move(batch, is_out=is_out)
                finally:
                    if batch.begun:
                        batch.end = lane.mark()

    def _copy_timed(self, lane: _Lane, batch: Batch, times: Times, *, is_out: bool) -> None:
        start = self.clock.mark(lane.stream)
        self._move(batch, is_out=is_out)
        end = self.clock.mark(lane.stream)
        batch.end = lane.number(end)
        times.append((batch.targets[0].nbytes, start, end))

    def _move(self, batch: Batch, *, is_out: bool) -> None:
        targets, sources, through = batch.targets, batch.sources, batch.through
        if through is None:
            try:
                copy_all(targets, sources)
                batch.begun = len(targets)
            except RuntimeError:  # of one of them: those before it may go
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
                    batch.begun += 1
            return
        (target,), (source,) = targets, sources
        if is_out:
            target.copy_(through(source), non_blocking=True)
        else:
            target.copy_(through(source.to(self._device, non_blocking=True)))
        batch.begun = 1

    def _meet(self, lane: _Lane, batches: Sequence[Batch]) -> None:
        """Let a lane wait for what its copies must come after."""
        met: Any = None
        for batch in batches:
            if batch.stream is not met:
                met = batch.stream
                self._here.record(met)
                lane.stream.wait_event(self._here)
            for mark in batch.after:
                mark.hold(lane.stream)

    def hold(self, stream: Any, mark: Mark) -> None:
        """Let a stream wait for a mark."""
        mark.hold(stream)

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        """Tell the allocator that a lane uses a tensor."""
        tensor.record_stream((self._out if is_out else self._back).stream)


class _Lane:
    """One way: a stream, and events that are used in turn, because making one costs more than recording it.

    An event that was recorded anew stands for a later point of the same stream. So who still waits for the earlier one
    waits longer than it need, never less.
    """

    __slots__ = ("_device", "_events", "_next", "_numbers", "stream", "waited")

    def __init__(self, device: torch.device) -> None:
        self.stream, self._device = torch.Stream(device), device
        self._events: list[torch.Event] = []
        self._next = self._numbers = 0
        self.waited: dict[Any, int] = {}  # by stream: the last mark that it has waited for

    def mark(self) -> LaneMark:
        """This point: the end of the copies that were begun so far."""
        at = self._next
        if at == len(self._events):
            self._events.append(torch.Event(self._device))
        event = self._events[at]
        event.record(self.stream)
        self._next = (at + 1) % _MOST_EVENTS
        return self.number(event)

    def number(self, event: torch.Event) -> LaneMark:
        """An event that was recorded here, as the next mark."""
        self._numbers += 1
        return LaneMark(event, self, self._numbers)


class LaneMark:
    """The end of copies on a lane.

    A lane does one thing after the other. So a stream that has waited for a mark need not wait for those before it: of
    the values of a step that come back together, one waits. Each wait costs the host about 2 µs.
    """

    __slots__ = ("_lane", "_met", "_number", "event")

    def __init__(self, event: torch.Event, lane: _Lane, number: int) -> None:
        self.event, self._lane, self._number = event, lane, number
        self._met: Any = None  # the stream that waited for it last

    def hold(self, stream: Any) -> None:
        """Let all that a stream does from here on wait for it."""
        if stream is self._met:
            return
        self._met = stream
        waited = self._lane.waited
        if waited.get(stream, 0) < self._number:
            stream.wait_event(self.event)
            waited[stream] = self._number

    def synchronize(self) -> None:
        """Block until it is reached."""
        self.event.synchronize()

    def query(self) -> bool:
        """Whether it has been reached."""
        return self.event.query()


class StreamClock(Protocol):
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
