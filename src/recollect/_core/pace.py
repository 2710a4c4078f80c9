"""Which of two keeps a step waiting, the host or the accelerator: a roofline of today's accelerators, roughly."""

from __future__ import annotations

# What an accelerator does in a second, and what a call of torch costs a host that follows a program: 20 µs of its own
# and 20 for following it, measured beside an H200, half as much again because the host must stay ahead.
_FLOPS_PER_S, _BYTES_PER_S, _READS_AND_WRITES, _HOST_S_PER_CALL = 4e14, 3e12, 3, 6e-5


def is_bound_by_host(*, flops: int, result_bytes: int, calls: int) -> bool:
    """Whether an accelerator would wait for the host, which a replay keeps busier than running again does.

    Where it is close, it is said to: a replay that keeps the accelerator waiting takes up to a third more time than
    running again, and one that does not saves a few percent at most.

    Args:
        flops: floating-point operations of the calls.
        result_bytes: of what they give.
        calls: how many calls of torch they are.

    >>> is_bound_by_host(flops=10**12, result_bytes=10**9, calls=30)
    False
    >>> is_bound_by_host(flops=10**9, result_bytes=10**7, calls=30)
    True
    """
    device_s = flops / _FLOPS_PER_S + _READS_AND_WRITES * result_bytes / _BYTES_PER_S
    return device_s < _HOST_S_PER_CALL * calls
