"""When the memory of values that are sent away is free, when it is taken again, and how long the step waits.

The executor's own timetable says when a value is let go and when its way back begins (`_core/timetables.py`); here that
is put on a clock that stops while the step waits. Where too many bytes are on their way, the step waits in forward;
where the host passes no place at which nothing is saved, for what has not left when the last value is saved; and in
backward, for what the link cannot bring back in time. It does not see that copies slow down kernels beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recollect._core.timetables import IN_FLIGHT_BYTES, SeenValue, Speeds, Timetable, make_timetable


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """From when to when a value takes no memory on the device; never if the two are the same."""

    gone_s: float
    back_s: float


def find_absences(
    values: Sequence[SeenValue],
    bytes_per_s: float,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    passes_s: Sequence[float] = (),
) -> tuple[list[Absence], float]:
    """For each value when it is away, by a clock that stops while the step waits, and how long the step waits in all.

    Args:
        values: that are sent, each with a use.
        bytes_per_s: what the link carries.
        in_flight_bytes: the most that is on its way at a time.
        passes_s: when regions that send nothing have run.

    >>> size = 10 * 2**20
    >>> values = [SeenValue(bytes=size, made_s=float(at), used_s=29.0 - at) for at in range(10)]
    >>> away, waits_s = find_absences(values, bytes_per_s=size / 2, passes_s=[12.0, 16.0])
    >>> away[0], away[9], waits_s  # gone when the third is saved; the last ones never leave
    (Absence(gone_s=2.0, back_s=26.0), Absence(gone_s=20.0, back_s=20.0), 0.0)
    """
    order = sorted(range(len(values)), key=lambda at: values[at].made_s)
    saved = [values[at] for at in order]
    speeds = Speeds(out=bytes_per_s, back=bytes_per_s)
    table = make_timetable(saved, speeds, in_flight=in_flight_bytes, waits=True, passes_s=passes_s)
    gone_s, back_s = _find_gone(table, saved, passes_s), _find_back(table, saved)
    absences = [Absence(gone_s=0.0, back_s=0.0)] * len(values)
    for number, at in enumerate(order):
        used_s = _use_of(values[at])
        free_s = gone_s.get(number, used_s)
        absences[at] = Absence(gone_s=free_s, back_s=max(free_s, back_s.get(number, used_s)))
    forward_s = table.delays_s[-1] if table.delays_s else 0.0
    waits_s = forward_s + _wait_at_last(table, saved, passes_s) + _count_late(table, saved, bytes_per_s)
    return absences, waits_s


def _use_of(value: SeenValue) -> float:
    assert value.used_s is not None
    return value.used_s


def _find_gone(table: Timetable, saved: Sequence[SeenValue], passes_s: Sequence[float]) -> dict[int, float]:
    """When the memory of each value that is sent is let go: at another one, where a place is passed, or in backward."""
    found = {number: saved[place].made_s for place, numbers in table.releases.items() for number in numbers}
    for place, numbers in table.passes.items():
        found.update(dict.fromkeys(numbers, passes_s[place]) if place >= 0 else {})
    if len(found) < len(table.gone_s):
        first_s, waited_s = min(map(_use_of, saved)), table.delays_s[-1]
        for number, end_s in table.gone_s.items():
            found.setdefault(number, max(end_s - waited_s, first_s))
    return found


def _find_back(table: Timetable, saved: Sequence[SeenValue]) -> dict[int, float]:
    """When the memory of each value that is sent is taken again: at the use at which its way back begins."""
    if not table.fetches:
        return {}
    first_s = min(map(_use_of, saved))
    return {
        number: first_s if place < 0 else _use_of(saved[place])
        for place, numbers in table.fetches.items()
        for number in numbers
    }


def _wait_at_last(table: Timetable, saved: Sequence[SeenValue], passes_s: Sequence[float]) -> float:
    """How long the last value that is saved waits for those before it, where no place is passed after that."""
    last = len(saved) - 1
    before = [table.gone_s[number] for number in table.releases.get(last, ()) if number != last]
    if passes_s or not before:
        return 0.0
    return max(0.0, max(before) - (saved[last].made_s + table.delays_s[last]))


def _count_late(table: Timetable, saved: Sequence[SeenValue], bytes_per_s: float) -> float:
    """How long backward waits because the link cannot bring all back in time, from its first use on."""
    next_s = float("inf")
    for number in reversed(table.order):
        next_s = min(next_s, _use_of(saved[number])) - saved[number].bytes / bytes_per_s
    turn_s = max((value.made_s for value in saved), default=0.0)
    return max(0.0, turn_s - next_s)
