"""When to send, let go and fetch each value of a step, by the times at which an earlier step made and used them.

No torch here: plain numbers, by which `_offload` runs steps and `_plan` foretells them. A value is worth sending if it
can be gone and back between its making and its use; the first layers' values have the longest time for it, the last
ones' none. The link carries one value at a time in each direction. See docs/design/offload.md.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

IN_FLIGHT_BYTES = 2**30
"""The most that is on its way at a time, unless somebody says otherwise."""

LEAST_BYTES = 2**16
"""Smaller values stay, unless somebody says otherwise."""

LINK_SHARE = 0.92
"""Of forward, in which all that is sent without waiting must be gone: copies beside kernels are slower at times."""

_LATE = 1.05  # how much longer than foreseen copies may take before the step waits for one to let go of its memory

_SLACK = 0.03  # of backward's time: how much earlier a value is to be back, at most; its own copy's time is enough

_AT_ONCE = 0.05  # of backward: later values are sent also over a link so slow that they come late

TOGETHER = 2**20
"""Bytes of small values that are sent, let go or fetched together: each copy and each wait costs the host its time."""

_SLOWER = 1.08  # how much longer than foreseen ways back are taken to be: one after the other, that adds up


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenValue:
    """What an earlier step saw of one value.

    Attributes:
        bytes: that travel.
        made_s: when it was saved, on a clock that stops while the step waits for copies.
        used_s: when backward first asked for it; None if it never did.
        is_held: whether somebody else held it all the time, so that sending it away freed nothing.
    """

    bytes: int
    made_s: float
    used_s: float | None
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How many bytes pass in a second, out and back."""

    out: float
    back: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """What a step is to do. Values are numbered in the order in which they are saved.

    Attributes:
        sends: whether each is sent at all.
        releases: for each number, the values whose memory is let go when that value has been saved.
        passes: likewise for each place that forward passes without saving anything; under -1 when backward begins.
        order: the values that are sent, in the order in which backward uses them.
        fetches: for each value used, those whose way back begins then; under -1 those that begin with backward.
        sent_bytes: of all that are sent.
        gone_s: for each that is sent, when it has left.
        delays_s: for each value, how much later it is saved because the step has waited.
    """

    sends: tuple[bool, ...]
    releases: dict[int, list[int]] = field(default_factory=dict)
    passes: dict[int, list[int]] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    fetches: dict[int, list[int]] = field(default_factory=dict)
    sent_bytes: int = 0
    gone_s: dict[int, float] = field(default_factory=dict)
    delays_s: tuple[float, ...] = ()


def make_timetable(
    values: Sequence[SeenValue],
    speeds: Speeds,
    *,
    in_flight: int,
    waits: bool,
    most_bytes: int | None = None,
    has_room: Sequence[bool] | None = None,
    passes_s: Sequence[float] = (),
) -> Timetable:
    """Choose what is sent, and when everything begins.

    Args:
        values: of an earlier step, in the order in which they were saved.
        speeds: of the link.
        in_flight: most bytes on their way out at a time, if the step may wait.
        waits: whether the step may wait for copies. If not, only what the link can carry beside forward is sent.
        most_bytes: that may be sent in all.
        has_room: of each value, whether there is room for it elsewhere; None if there is for all.
        passes_s: when forward passes places at which nothing is saved, and memory can be let go all the same.

    >>> first = SeenValue(bytes=100, made_s=0.0, used_s=10.0)
    >>> last = SeenValue(bytes=100, made_s=4.9, used_s=5.1)
    >>> table = make_timetable([first, last], Speeds(out=100.0, back=100.0), in_flight=100, waits=False)
    >>> table.sends, table.releases, table.fetches
    ((True, False), {1: [0]}, {1: [0]})
    """
    if waits:
        # As if there were room for all: else the last of those that have it would seem to be needed at once.
        gone_s, delay_s = _send_waiting(values, speeds, in_flight, most_bytes)
        gone_s = {at: end_s for at, end_s in gone_s.items() if has_room is None or has_room[at]}
    else:
        gone_s = _send_hidden(values, speeds, most_bytes, has_room)
        delay_s = [0.0] * len(values)
    uses = _Uses.of(values, delay_s[-1] if delay_s else 0.0)
    gone_s = {at: end_s for at, end_s in gone_s.items() if not uses.is_at_once(values[at], speeds)}
    fetches, order = _plan_fetches(values, speeds, gone_s, uses)
    made_s = [value.made_s + delay for value, delay in zip(values, delay_s, strict=True)]
    first_s = made_s[0] if made_s else 0.0
    ends_s = gone_s if waits else {at: first_s + _LATE * (end_s - first_s) for at, end_s in gone_s.items()}
    releases, passes = _plan_releases(ends_s, made_s, _delay(passes_s, values, delay_s), uses)
    sizes, least = [value.bytes for value in values], least_together(in_flight)
    return Timetable(
        sends=tuple(number in gone_s for number in range(len(values))),
        releases=_gather(releases, range(len(values)), sizes, least),
        passes=passes,
        order=order,
        fetches={
            at: numbers[::-1] for at, numbers in _gather(fetches, [*uses.numbers[::-1], -1], sizes, least).items()
        },
        sent_bytes=sum(values[number].bytes for number in gone_s),
        gone_s=gone_s,
        delays_s=tuple(delay_s),
    )


def _delay(passes_s: Sequence[float], values: Sequence[SeenValue], delay_s: Sequence[float]) -> list[float]:
    """When places are passed, if values are saved so much later."""
    seen_s = [value.made_s for value in values]
    return [
        at_s + (delay_s[before - 1] if before else 0.0)
        for at_s in passes_s
        for before in [bisect.bisect_right(seen_s, at_s)]
    ]


def _plan_releases(
    ends_s: dict[int, float], made_s: Sequence[float], passes_s: Sequence[float], uses: _Uses
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Where the memory of values is let go, by values saved and by places passed: at the first that comes after it.

    If places are passed, what is gone after all of these is let go when backward begins, or later. Else the last value
    waits for it.
    """
    releases: dict[int, list[int]] = {}
    passes: dict[int, list[int]] = {}
    last = len(made_s) - 1
    for number, end_s in ends_s.items():
        saved = max(bisect.bisect_left(made_s, end_s), number)
        passed = bisect.bisect_left(passes_s, end_s)
        is_passed = passed < len(passes_s) and (saved > last or passes_s[passed] < made_s[saved])
        if is_passed:
            passes.setdefault(passed, []).append(number)
        elif saved > last and passes_s:
            if uses.times_s and end_s <= uses.times_s[0]:
                passes.setdefault(-1, []).append(number)  # else it is let go in backward, when it has left
        else:
            releases.setdefault(min(saved, last), []).append(number)
    return releases, passes


def least_together(in_flight: int) -> int:
    """Bytes from which on it is worth doing something, with so many at most on their way."""
    return min(TOGETHER, in_flight // 16)


def _gather(
    points: dict[int, list[int]], places: Iterable[int], sizes: Sequence[int], least: int
) -> dict[int, list[int]]:
    """Do small things together, at the last of their places: each place of a step costs the host its time."""
    gathered: dict[int, list[int]] = {}
    waiting: list[int] = []
    last, total = None, 0
    for place in places:
        numbers = points.get(place)
        if numbers is None:
            continue
        waiting += numbers
        last, total = place, total + sum(sizes[number] for number in numbers)
        if total >= least:
            gathered[place] = waiting
            waiting, total = [], 0
    if last is not None and waiting:
        gathered.setdefault(last, []).extend(waiting)
    return gathered


def _send_hidden(
    values: Sequence[SeenValue], speeds: Speeds, most_bytes: int | None, has_room: Sequence[bool] | None
) -> dict[int, float]:
    """The values that the link can carry away beside forward, and when each is gone."""
    if not values:
        return {}
    first_s, last_s = values[0].made_s, values[-1].made_s
    deadline_s = first_s + LINK_SHARE * (last_s - first_s)
    gone_s: dict[int, float] = {}
    free_s, sent = first_s, 0
    for number, value in enumerate(values):
        end_s = max(free_s, value.made_s) + value.bytes / speeds.out
        returns_s = end_s + value.bytes / speeds.back
        fits = (most_bytes is None or sent + value.bytes <= most_bytes) and (has_room is None or has_room[number])
        is_back = value.used_s is None or returns_s < value.used_s
        if not value.is_held and fits and end_s <= deadline_s and is_back:
            gone_s[number], free_s, sent = end_s, end_s, sent + value.bytes
    return gone_s


def _send_waiting(
    values: Sequence[SeenValue], speeds: Speeds, in_flight: int, most_bytes: int | None
) -> tuple[dict[int, float], list[float]]:
    """All values whose use leaves time to be gone and back, when each is gone, and how late each one is made."""
    gone_s: dict[int, float] = {}
    delay_s: list[float] = []
    free_s, late_s, flying, sent = float("-inf"), 0.0, 0, 0
    leaving: deque[int] = deque()
    for number, value in enumerate(values):
        if not value.is_held and (most_bytes is None or sent + value.bytes <= most_bytes):
            now_s = value.made_s + late_s
            free_s = gone_s[number] = max(free_s, now_s) + value.bytes / speeds.out
            leaving.append(number)
            flying, sent = flying + value.bytes, sent + value.bytes
            while leaving and gone_s[leaving[0]] <= now_s:
                flying -= values[leaving.popleft()].bytes
            while flying > in_flight and len(leaving) > 1:
                oldest = leaving.popleft()
                late_s += max(gone_s[oldest] - (value.made_s + late_s), 0.0)
                flying -= values[oldest].bytes
        delay_s.append(late_s)
    for number in list(gone_s):
        value = values[number]
        if value.used_s is not None and gone_s[number] + value.bytes / speeds.back >= value.used_s + late_s:
            del gone_s[number]
    return gone_s, delay_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """When backward asks for values.

    Attributes:
        times_s: in order; `numbers` says of which.
        late_s: how much later than it was seen, because the step waits in forward.
        slack_s: how much earlier values are to be back, at most.
    """

    times_s: list[float]
    numbers: list[int]
    late_s: float
    slack_s: float

    @classmethod
    def of(cls, values: Sequence[SeenValue], late_s: float) -> _Uses:
        uses = sorted(
            (value.used_s + late_s, number) for number, value in enumerate(values) if value.used_s is not None
        )
        times_s = [used_s for used_s, _ in uses]
        slack_s = _SLACK * (times_s[-1] - times_s[0]) if uses else 0.0
        return cls(times_s=times_s, numbers=[number for _, number in uses], late_s=late_s, slack_s=slack_s)

    def begin_s(self, used_s: float, copy_s: float) -> float:
        """When a way back that takes so long must begin, if nothing else is on the link."""
        return used_s - min(self.slack_s, copy_s) - _SLOWER * copy_s

    def last_before(self, when_s: float) -> int:
        """The place of the last use that is not later; -1 if all are."""
        return bisect.bisect_right(self.times_s, when_s) - 1

    def is_at_once(self, value: SeenValue, speeds: Speeds) -> bool:
        """Whether its way back must begin with backward, where memory is at its peak: sending it frees nothing."""
        if value.used_s is None:
            return False
        times_s, used_s = self.times_s, value.used_s + self.late_s
        is_soon = used_s - times_s[0] <= _AT_ONCE * (times_s[-1] - times_s[0])
        return is_soon and self.last_before(self.begin_s(used_s, value.bytes / speeds.back)) <= 0


def _plan_fetches(
    values: Sequence[SeenValue], speeds: Speeds, gone_s: dict[int, float], uses: _Uses
) -> tuple[dict[int, list[int]], tuple[int, ...]]:
    """At whose use each value's way back begins: as late as it can, all that must come before others' included.

    At each place the last one first; and in which order they are used.
    """
    fetches: dict[int, list[int]] = {}
    next_s = float("inf")
    for used_s, number in zip(reversed(uses.times_s), reversed(uses.numbers), strict=True):
        if number not in gone_s:
            continue
        copy_s = values[number].bytes / speeds.back
        next_s = min(uses.begin_s(used_s, copy_s), next_s - _SLOWER * copy_s)
        at = uses.last_before(max(next_s, gone_s[number]))
        fetches.setdefault(-1 if at < 0 else uses.numbers[at], []).append(number)
    return fetches, tuple(number for number in uses.numbers if number in gone_s)
