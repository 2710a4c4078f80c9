"""Which of two keeps a step waiting, the host or the accelerator: a roofline of today's accelerators, roughly."""

from __future__ import annotations

# What an accelerator does in a second.
_FLOPS_PER_S, _BYTES_PER_S, _READS_AND_WRITES = 4e14, 3e12, 3

CALLED, FOLLOWED = 2e-5, 6e-5
"""The seconds that a call of torch takes the host, measured beside an H200: by itself; and where a program is followed,
which takes as long again, and half of both because the host must stay ahead."""

SURELY = CALLED / 8
"""The same, where an accelerator of an eighth of that speed would wait for the host, too."""


def is_bound_by_host(*, flops: int, result_bytes: int, calls: int, call_s: float = CALLED) -> bool:
    """Whether an accelerator would wait for the host, which a replay keeps busier than running again does.

    Args:
        flops: floating-point operations of the calls.
        result_bytes: of what they give.
        calls: how many calls of torch they are.
        call_s: the seconds that each takes the host.

    >>> is_bound_by_host(flops=10**12, result_bytes=10**9, calls=30)
    False
    >>> is_bound_by_host(flops=10**9, result_bytes=10**7, calls=30)
    True
    """
    device_s = flops / _FLOPS_PER_S + _READS_AND_WRITES * result_bytes / _BYTES_PER_S
    return device_s < call_s * calls
