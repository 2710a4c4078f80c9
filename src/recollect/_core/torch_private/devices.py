"""Holding a device back: it does nothing for a while, and what is launched meanwhile waits in its queue.

Private names: ``torch.cuda._sleep``.
Would be replaced by: a public kernel that waits.
Run on: torch 2.11 (CUDA).
"""

from __future__ import annotations

import torch

_CYCLES_PER_S = 1.7e9  # of the clocks of devices of the last years 1.4 to 2.6; how long exactly does not matter here


def can_hold(device: torch.device) -> bool:
    """Whether `hold_device` works there."""
    return device.type == "cuda" and hasattr(torch.cuda, "_sleep")


def hold_device(device: torch.device, seconds: float) -> None:
    """Let a device's current stream do nothing for about that long."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))
