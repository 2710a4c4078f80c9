"""When values that are sent away are gone, when their way back begins, and how long the step waits for the link.

The link carries one value at a time in each direction, in the order of saving out and of using back. A value leaves
when it was saved, and comes back as late as it can. Copies that are on their way hold their memory on the device;
where too many bytes are, the step waits. It does not see that copies slow down kernels beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IN_FLIGHT_BYTES = 2**30
"""The most that is on its way at a time, as `recollect.offload` has it."""

LEAST_BYTES = 2**16
"""Smaller values stay, as `recollect.offload` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """A value that is sent away.

    Attributes:
        bytes: how many.
        made_s: when it was saved.
        used_s: when backward asks for it.
    """

    bytes: int
    made_s: float
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """From when to when a value is not on the device; nowhere gone if the two are the same."""

    gone_s: float
    back_s: float


def find_absences(
    journeys: Sequence[Journey], bytes_per_s: float, in_flight_bytes: int = IN_FLIGHT_BYTES
) -> tuple[list[Absence], float]:
    """For each value when it is away, and how long the step waits in all.

    >>> values = [Journey(bytes=10, made_s=0.0, used_s=9.0), Journey(bytes=10, made_s=1.0, used_s=8.0)]
    >>> find_absences(values, bytes_per_s=5.0)
    ([Absence(gone_s=2.0, back_s=7.0), Absence(gone_s=4.0, back_s=5.0)], 0.0)
    """
    order = sorted(range(len(journeys)), key=lambda at: journeys[at].made_s)
    gone: dict[int, float] = {}
    free_s = wait_s = 0.0
    for at in order:
        one = journeys[at]
        made_s = one.made_s + wait_s
        backlog_s = max(0.0, free_s - made_s) + (one.bytes - in_flight_bytes) / bytes_per_s
        if backlog_s > 0:
            wait_s += backlog_s
            made_s += backlog_s
        free_s = max(free_s, made_s) + one.bytes / bytes_per_s
        gone[at] = free_s - wait_s
    back: dict[int, float] = {}
    next_s = float("inf")
    for at in sorted(range(len(journeys)), key=lambda at: -journeys[at].used_s):
        one = journeys[at]
        next_s = min(next_s, one.used_s) - one.bytes / bytes_per_s
        back[at] = next_s
    turn_s = max((one.made_s for one in journeys), default=0.0)
    late_s = max((turn_s - back[at] for at in back), default=0.0)
    absences = [
        Absence(gone_s=gone[at], back_s=max(gone[at], back[at], min(turn_s, one.used_s)))
        for at, one in enumerate(journeys)
    ]
    return absences, wait_s + max(0.0, late_s)
