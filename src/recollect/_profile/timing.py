"""How long each operator takes: the host to call it, and the device to run it, apart.

On a device, operators are timed by events around each. Watching slows the host down, so that a device with small
kernels would wait for it, and events would measure the waiting. So the device is held back (`hold_device`) before it
catches up: it always finds the next operators queued.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from recollect._core.profiles import Clock
from recollect._core.torch_private.devices import can_hold, hold_device

_PAIRS = 15
_HALF_S = 0.5e-3
"""Half of how long the device is held back each time: about what the host takes for six watched operators."""


@dataclass(frozen=True, slots=True)
class Span:
    """How long one operator took.

    Attributes:
        device_s: where it ran.
        host_s: until its call returned; None where it ran on the host itself.
    """

    device_s: float
    host_s: float | None = None


class Timer(Protocol):
    """Times operators one by one.

    Attributes:
        clock: what it reads.
    """

    clock: Clock | None

    def start(self) -> Any:
        """An operator begins."""

    def stop(self, started: Any) -> Any:
        """It has been called; gives what `read` reads later."""

    def read(self, raw: Any) -> Span | None:
        """How long it took; asked after `settle`."""

    def settle(self) -> None:
        """Wait until all that was timed is done."""


class HostTimer:
    """By the host's clock: right where operators run on the host."""

    clock: Clock | None = Clock.HOST

    def start(self) -> float:
        """An operator begins."""
        return time.perf_counter()

    def stop(self, started: float) -> float:
        """It is done."""
        return time.perf_counter() - started

    def read(self, raw: float) -> Span:
        """How long it took."""
        return Span(raw)

    def settle(self) -> None:
        """There is nothing to wait for."""


_Started = tuple[torch.Event, float]
_Stopped = tuple[torch.Event, torch.Event, float]


class DeviceTimer:
    """By two events around each operator, on the stream that it runs on. Nothing waits until `settle`.

    Where the device cannot be held back, an operator shorter than its own launch is measured as that launch.
    """

    clock: Clock | None = Clock.DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._can_hold = can_hold(device)
        self._middle: torch.Event | None = None
        self._empty_s = self._measure_empty() if self._can_hold else 0.0

    def start(self) -> _Started:
        """An operator begins."""
        if self._can_hold and (self._middle is None or self._middle.query()):
            # The device is past the middle of the last hold: the next one stands in the queue before it comes there.
            hold_device(self._device, _HALF_S)
            self._middle = self._record()
            hold_device(self._device, _HALF_S)
        event = self._record()
        return event, time.perf_counter()

    def stop(self, started: _Started) -> _Stopped:
        """It has been launched."""
        event, began_s = started
        host_s = time.perf_counter() - began_s
        return event, self._record(), host_s

    def read(self, raw: _Stopped) -> Span:
        """How long it took."""
        started, stopped, host_s = raw
        return Span(max(0.0, started.elapsed_time(stopped) / 1e3 - self._empty_s), host_s)

    def settle(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self._device)

    def _record(self) -> torch.Event:
        # Not torch.cuda.Event: it looks for the current stream in Python, 15 µs each time.
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _measure_empty(self) -> float:
        """What two events around nothing measure."""
        hold_device(self._device, _HALF_S)
        pairs = [(self._record(), self._record()) for _ in range(_PAIRS)]
        self.settle()
        return statistics.median(one.elapsed_time(other) for one, other in pairs) / 1e3


class NoTimer:
    """Where nothing runs there is nothing to time."""

    clock: Clock | None = None

    def start(self) -> None:
        """An operator begins."""

    def stop(self, started: None) -> None:
        """It is done."""

    def read(self, raw: None) -> None:
        """Nobody knows."""

    def settle(self) -> None:
        """There is nothing to wait for."""


def timer_for(device: torch.device) -> Timer:
    """What times operators on a device."""
    found = torch.accelerator.current_accelerator()
    return DeviceTimer(device) if found is not None and found.type == device.type else HostTimer()
