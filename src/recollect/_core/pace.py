"""Which of two keeps a step waiting, the host or the accelerator: a roofline of accelerators, roughly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_FLOPS_REACHED, _BYTES_REACHED = 0.4, 0.6
"""Of the makers' peaks, by blocks of models."""
_READS_AND_WRITES = 3

CALLED, FOLLOWED = 2e-5, 6e-5
"""The seconds that a call of torch takes the host, measured beside an H200: by itself; and where a program is followed,
which takes as long again, and half of both because the host must stay ahead."""

SERVED, SURELY_SERVED = FOLLOWED / 2, CALLED / 8
"""The same where kept values are served: an H200 gains from about 30 µs on, and takes a fifth longer at 16. And where
nobody knows how fast the accelerator is: so that one of an eighth of that speed would wait for the host, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeeds:
    """What an accelerator can do in a second, as its maker says.

    Attributes:
        flops: operations, by the dtype of what they give; of others as many as of the slowest.
        bandwidth: bytes that it reads or writes.
    """

    flops: Mapping[str, float] = field(default_factory=lambda: {"": 1e15})
    bandwidth: float = 5e12

    def device_s(self, *, flops: Mapping[str, int], result_bytes: int) -> float:
        """How long it takes for calls, if it never waits.

        Args:
            flops: of the calls, by the dtype of what they give.
            result_bytes: of all that they give.

        >>> DeviceSpeeds().device_s(flops={"bfloat16": 10**12}, result_bytes=10**9)
        0.0035
        """
        slowest = min(self.flops.values())
        computing_s = sum(count / self.flops.get(dtype, slowest) for dtype, count in flops.items())
        return computing_s / _FLOPS_REACHED + _READS_AND_WRITES * result_bytes / (self.bandwidth * _BYTES_REACHED)


TODAYS = DeviceSpeeds()
"""Of an accelerator of the year 2024, about."""


def is_bound_by_host(*, device_s: float, calls: int, call_s: float = CALLED) -> bool:
    """Whether an accelerator would wait for the host.

    Args:
        device_s: the seconds that the calls take the accelerator.
        calls: how many calls of torch they are.
        call_s: the seconds that each takes the host.

    >>> is_bound_by_host(device_s=1e-3, calls=30), is_bound_by_host(device_s=1e-4, calls=30)
    (False, True)
    """
    return device_s < call_s * calls
