"""When the memory of values that are sent away is free, when it is taken again, and how long the step waits.

It follows what `recollect.offload` does, by the same times. The link carries one value at a time in each direction, in
the order of saving out and of using back. A value leaves when it was saved. Its memory is let go when another one is
saved after it has left, or a region that sends nothing has run, for only then does the host look. What has not left by
the last of these is let go when backward asks for the first value; without such regions, the step waits for it where
the last value is saved. It is taken again when one is used before its way back must
begin, early enough for a link that has become a little slower. Where too many bytes are on their way, the step waits.
It does not see that copies slow down kernels beside them.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

IN_FLIGHT_BYTES = 2**30
"""The most that is on its way at a time, as `recollect.offload` has it."""

LEAST_BYTES = 2**16
"""Smaller values stay, as `recollect.offload` has it."""

# As the timetables of `recollect.offload` have them, which a test compares with these.
_SLACK, _SLOWER, _AT_ONCE = 0.03, 1.08, 0.05


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
    """From when to when a value takes no memory on the device; never if the two are the same."""

    gone_s: float
    back_s: float


def find_absences(
    journeys: Sequence[Journey],
    bytes_per_s: float,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    passes_s: Sequence[float] = (),
) -> tuple[list[Absence], float]:
    """For each value when it is away, by a clock that stops while the step waits, and how long the step waits in all.

    Args:
        journeys: the values.
        bytes_per_s: what the link carries.
        in_flight_bytes: the most that is on its way at a time.
        passes_s: when regions that send nothing have run.

    >>> values = [Journey(bytes=10, made_s=float(at), used_s=29.0 - at) for at in range(10)]
    >>> away, waits_s = find_absences(values, bytes_per_s=5.0, passes_s=[12.0, 16.0])
    >>> away[0], away[9], waits_s  # gone when the third is saved; the last ones never leave
    (Absence(gone_s=2.0, back_s=26.0), Absence(gone_s=20.0, back_s=20.0), 0.0)
    """
    order = sorted(range(len(journeys)), key=lambda at: journeys[at].made_s)
    gone_s, late_s = _send(journeys, order, bytes_per_s, in_flight_bytes)
    waits_s = late_s[-1] if late_s else 0.0
    uses = sorted(range(len(journeys)), key=lambda at: journeys[at].used_s)
    times_s = [journeys[at].used_s + waits_s for at in uses]
    back_s = _fetch(journeys, uses, times_s, gone_s, bytes_per_s)
    looks = _Looks.of(journeys, order, late_s, passes_s, first_s=times_s[0] if times_s else 0.0)
    absences = []
    for at, one in enumerate(journeys):
        if at not in back_s:
            absences.append(Absence(gone_s=one.used_s, back_s=one.used_s))
            continue
        free_s = looks.find_free_s(gone_s[at])
        absences.append(Absence(gone_s=free_s, back_s=max(free_s, back_s[at] - waits_s)))
    ends_s = [gone_s[at] for at in order[:-1] if at in back_s]
    last_s = looks.find_wait_s(ends_s[-1]) if ends_s else 0.0
    return absences, waits_s + last_s + _count_late(journeys, uses, back_s, bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looks:
    """The moments at which the host lets go of what has left.

    Attributes:
        late_s: these, in order, with the waits before them.
        free_s: the same by the clock that stops while the step waits.
        has_passes: whether some are of regions that send nothing.
        first_s: when backward asks for the first value.
    """

    late_s: list[float]
    free_s: list[float]
    has_passes: bool
    first_s: float

    @classmethod
    def of(
        cls,
        journeys: Sequence[Journey],
        order: Sequence[int],
        late_s: Sequence[float],
        passes_s: Sequence[float],
        *,
        first_s: float,
    ) -> _Looks:
        made_s = [journeys[at].made_s for at in order]
        before = [bisect.bisect_right(made_s, at_s) for at_s in passes_s]
        passed = [(at_s + late_s[count - 1], at_s) for at_s, count in zip(passes_s, before, strict=True) if count]
        saved = [(own_s + late, own_s) for own_s, late in zip(made_s, late_s, strict=True)]
        both = sorted([*saved, *passed])
        return cls(
            late_s=[late for late, _ in both],
            free_s=[free for _, free in both],
            has_passes=bool(passed),
            first_s=first_s,
        )

    def find_free_s(self, gone_s: float) -> float:
        """When the memory of a value is let go that has left then."""
        at = bisect.bisect_left(self.late_s, gone_s)
        if at == len(self.late_s) and self.has_passes:
            return max(gone_s, self.first_s) - (self.late_s[-1] - self.free_s[-1])
        return self.free_s[min(at, len(self.free_s) - 1)]

    def find_wait_s(self, gone_s: float) -> float:
        """How long the last look waits for a value that has left then."""
        return 0.0 if self.has_passes or not self.late_s else max(0.0, gone_s - self.late_s[-1])


def _send(
    journeys: Sequence[Journey], order: Sequence[int], bytes_per_s: float, in_flight_bytes: int
) -> tuple[dict[int, float], list[float]]:
    """When each value has left, and how long the step has waited when each was saved."""
    gone_s: dict[int, float] = {}
    late_s: list[float] = []
    leaving: deque[int] = deque()
    free_s, waited_s, flying = float("-inf"), 0.0, 0
    for at in order:
        one = journeys[at]
        now_s = one.made_s + waited_s
        free_s = gone_s[at] = max(free_s, now_s) + one.bytes / bytes_per_s
        leaving.append(at)
        flying += one.bytes
        while leaving and gone_s[leaving[0]] <= now_s:
            flying -= journeys[leaving.popleft()].bytes
        while flying > in_flight_bytes and len(leaving) > 1:
            oldest = leaving.popleft()
            waited_s += max(gone_s[oldest] - (one.made_s + waited_s), 0.0)
            flying -= journeys[oldest].bytes
        late_s.append(waited_s)
    return gone_s, late_s


def _fetch(
    journeys: Sequence[Journey],
    uses: Sequence[int],
    times_s: Sequence[float],
    gone_s: dict[int, float],
    bytes_per_s: float,
) -> dict[int, float]:
    """When the way back of each value that leaves begins: at the last use that is early enough."""
    found: dict[int, float] = {}
    if not uses:
        return found
    span_s = times_s[-1] - times_s[0]
    next_s = float("inf")
    for place in reversed(range(len(uses))):
        at, used_s = uses[place], times_s[place]
        copy_s = journeys[at].bytes / bytes_per_s
        if gone_s[at] + copy_s >= used_s:
            continue
        begin_s = used_s - min(_SLACK * span_s, copy_s) - _SLOWER * copy_s
        if used_s - times_s[0] <= _AT_ONCE * span_s and bisect.bisect_right(times_s, begin_s) <= 1:
            continue
        next_s = min(begin_s, next_s - _SLOWER * copy_s)
        before = bisect.bisect_right(times_s, max(next_s, gone_s[at])) - 1
        found[at] = times_s[max(before, 0)]
    return found


def _count_late(
    journeys: Sequence[Journey], uses: Sequence[int], back_s: dict[int, float], bytes_per_s: float
) -> float:
    """How long backward waits because the link cannot bring all back in time, from its first use on."""
    next_s = float("inf")
    for at in reversed(uses):
        if at in back_s:
            next_s = min(next_s, journeys[at].used_s) - journeys[at].bytes / bytes_per_s
    turn_s = max((one.made_s for one in journeys), default=0.0)
    return max(0.0, turn_s - next_s)
