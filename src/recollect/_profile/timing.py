"""How long each operator takes: by events of the device, or by the host's clock where the host does the work."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from recollect._core.profiles import Clock


class Timer(Protocol):
    """Times operators one by one.

    Attributes:
        clock: what it reads.
    """

    clock: Clock | None

    def start(self) -> Any:
        """An operator begins."""

    def stop(self, started: Any) -> Any:
        """It has been called; gives what `seconds` reads later."""

    def seconds(self, span: Any) -> float | None:
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

    def seconds(self, span: float) -> float:
        """How long it took."""
        return span

    def settle(self) -> None:
        """There is nothing to wait for."""


class DeviceTimer:
    """By two events around each operator, on the stream that it runs on. Nothing waits until `settle`.

    An operator shorter than its own launch is measured as that launch: the device is idle in between.
    """

    clock: Clock | None = Clock.DEVICE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> torch.Event:
        """An operator begins."""
        # Not torch.cuda.Event: it looks for the current stream in Python, 15 us each time.
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def stop(self, started: torch.Event) -> tuple[torch.Event, torch.Event]:
        """It has been launched."""
        return started, self.start()

    def seconds(self, span: tuple[torch.Event, torch.Event]) -> float:
        """How long it took."""
        started, stopped = span
        return float(started.elapsed_time(stopped)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize(self._device)


class NoTimer:
    """Where nothing runs there is nothing to time."""

    clock: Clock | None = None

    def start(self) -> None:
        """An operator begins."""

    def stop(self, started: None) -> None:
        """It is done."""

    def seconds(self, span: None) -> None:
        """Nobody knows."""

    def settle(self) -> None:
        """There is nothing to wait for."""


def timer_for(device: torch.device) -> Timer:
    """What times operators on a device."""
    found = torch.accelerator.current_accelerator()
    return DeviceTimer(device) if found is not None and found.type == device.type else HostTimer()
