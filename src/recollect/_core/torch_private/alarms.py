"""A callback for when an allocation on a CUDA device fails, while everything that led there is still alive.

By the time an exception is caught, whatever only the failing expressions held is gone: in ``model(x).float()`` the
whole graph. The allocator calls observers before it raises, on the thread that asked, outside of its lock. There the
running autograd node can be asked for, too. An observer cannot be taken away again, so one is attached for the
process, once, when an alarm is first set; it does nothing while no alarm is.

Private names: ``torch._C._cuda_attach_out_of_memory_observer``, ``torch.cuda._lazy_call``,
``torch._C._current_autograd_node``.
Would be replaced by: a public observer for all devices that can be removed, as `torch.mtia` has a part of.
Run on: torch 2.11, 2.13 without CUDA; with it by the tests marked `gpu`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_ATTACH = "_cuda_attach_out_of_memory_observer"  # not there in builds without CUDA


class Alarm:
    """While set, calls a function with the index of the device whose allocation fails. It must not raise."""

    def __init__(self, ring: Callable[[int], None]) -> None:
        self.ring = ring

    def start(self) -> None:
        """Set it."""
        with _lock:
            _alarms.append(self)
            if not _attached and hasattr(torch._C, _ATTACH):
                _attached.append(_observe)
                torch.cuda._lazy_call(_attach)

    def stop(self) -> None:
        """Set it no more."""
        with _lock:
            _alarms.remove(self)


_lock = threading.Lock()
_alarms: list[Alarm] = []
_attached: list[Callable[..., None]] = []


def _attach() -> None:
    """Called when CUDA starts, or at once if it has: before that there is no allocator."""
    vars(torch._C)[_ATTACH](_observe)


def _observe(device: int, *_: Any) -> None:
    for alarm in tuple(_alarms):
        alarm.ring(device)


def running_node() -> Any:
    """The autograd node that runs on this thread; None outside of backward."""
    return torch._C._current_autograd_node()
