"""Steps: which values a training step saves, in which order and when backward asks for them, seen and foreseen.

A step begins with the first value that is saved after backward has asked for one. What was seen of a step becomes a
lesson; a later step that begins in the same way is foreseen by it, until it saves something else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from recollect._core.timetables import SeenValue, Speeds, Timetable

if TYPE_CHECKING:
    from recollect._offload.kinds import Kind
    from recollect._offload.parcels import Parcel
    from recollect._offload.streams import Mark, StreamClock
    from recollect._offload.transfers import Transfers

_MOST_LESSONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What was learnt of a step: the kinds of its values, and what to do with them the next time.

    Attributes:
        kinds: of its values, in order.
        values: what was seen of them.
        speeds: of the link.
        passes_s: when forward passed places without saving anything.
        timetable: for the next step; None while too little was seen.
        times_seen: how often such a step was measured.
        has_room: for which values room was pinned; None while that is still to be done.
    """

    kinds: tuple[Kind, ...]
    values: tuple[SeenValue, ...]
    speeds: Speeds
    timetable: Timetable | None
    times_seen: int
    has_room: tuple[bool, ...] | None = None
    passes_s: tuple[float, ...] = ()


class Lessons:
    """What was learnt of the last few kinds of step."""

    def __init__(self) -> None:
        self._all: deque[Lesson] = deque(maxlen=_MOST_LESSONS)  # the latest first

    def add(self, lesson: Lesson) -> None:
        """Learn of a step; what was known of one with the same values is replaced."""
        known = [one for one in self._all if one.kinds != lesson.kinds]
        self._all = deque([lesson, *known], maxlen=_MOST_LESSONS)

    def find(self, begin: list[Kind]) -> Lesson | None:
        """The latest lesson about steps that begin so."""
        count = len(begin)
        for lesson in self._all:
            if len(lesson.kinds) >= count and all(one is kind for one, kind in zip(begin, lesson.kinds, strict=False)):
                return lesson
        return None

    def about(self, kinds: tuple[Kind, ...]) -> Lesson | None:
        """What is known of the step with exactly these values."""
        return next((one for one in self._all if one.kinds == kinds), None)


class SeenStep:
    """One step, as it is seen.

    Attributes:
        parcels: its values in the order in which they were saved, weakly.
        kinds: of them.
        foreseen: the kinds that are to come, as far as that is known; so `sends`, `releases`, `passes` and `fetches`,
            which are those of the timetable.
        passed: how many places forward has passed without saving anything.
        lesson: by which it is foreseen, if it is.
        has_backward: whether backward has asked for one of them.
        due: numbers of those whose way back is to begin next.
        flying_bytes: of those that are on their way back or wait there to be asked for.
        flying: numbers of those among them that a slower tier is asked for.
        leaving: numbers of those that are on their way out, oldest first.
        late: numbers of those whose memory was to be let go before they had left.
        small: numbers of small ones whose memory is to be let go with that of others.
        held: numbers of those that somebody else held all the time.
        transfers: what carries them; `accounts` says what it did.
        clock: by which times are taken; None before the first, or if none are.
        is_closed: whether everything was learnt from it.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers, self.accounts = transfers, transfers.accounts
        self.parcels: list[ref[Parcel]] = []
        self.kinds: list[Kind] = []
        self.follow(None)
        self.has_backward = False
        self.due: deque[int] = deque()
        self.flying_bytes = 0
        self.flying: set[int] = set()
        self.leaving: deque[int] = deque()
        self.late: list[int] = []
        self.small: list[int] = []
        self.held: set[int] = set()
        self.clock: StreamClock | None = None
        self.is_closed = False
        self.passed = 0
        self._passed: list[tuple[Mark, int]] = []
        self._stream: Any = None
        self._made: list[tuple[Mark, int]] = []
        self._asked: dict[int, tuple[Mark, int]] = {}
        self._sizes: list[int] = []

    def follow(self, lesson: Lesson | None) -> None:
        """Go on by a lesson, or by none."""
        self.lesson = lesson
        self.foreseen: tuple[Kind, ...] = () if lesson is None else lesson.kinds
        table = None if lesson is None else lesson.timetable
        self.sends: tuple[bool, ...] | None = None if table is None else table.sends
        self.releases: dict[int, list[int]] = {} if table is None else table.releases
        self.passes: dict[int, list[int]] = {} if table is None else table.passes
        self.fetches: dict[int, list[int]] = {} if table is None else table.fetches

    def live(self, numbers: Iterable[int]) -> list[Parcel]:
        """Those of its values that somebody can still ask for."""
        return [parcel for number in numbers if (parcel := self.parcels[number]()) is not None]

    @property
    def timetable(self) -> Timetable | None:
        """What it is to do, if it is foreseen."""
        return None if self.lesson is None else self.lesson.timetable

    def note_made(self, parcel: Parcel, clock: StreamClock) -> None:
        """A value is saved."""
        self.clock, self._stream = clock, parcel.stream
        self._made.append((clock.mark(parcel.stream), len(self.accounts.stalls)))
        self._sizes.append(parcel.kind.travel_bytes)

    def note_passed(self) -> None:
        """Forward passes a place after the first value was saved."""
        if self.clock is not None:
            self._passed.append((self.clock.mark(self._stream), len(self.accounts.stalls)))

    def note_used(self, number: int, clock: StreamClock, stream: Any) -> None:
        """Backward asks for a value for the first time."""
        if number not in self._asked:
            self._asked[number] = (clock.mark(stream), len(self.accounts.stalls))

    def is_done(self) -> bool:
        """Whether nobody can ask for a value any more for the first time."""
        return all((parcel := one()) is None or parcel.is_used for one in self.parcels)

    def last_mark(self) -> Mark | None:
        """The latest point that was marked."""
        marks = self._asked or dict(enumerate(self._made))
        return marks[next(reversed(marks))][0] if marks else None

    def seen(self, stalls_s: list[float]) -> list[SeenValue]:
        """What was seen of each value, with the waits taken out of the time. All marks must have been reached."""
        if not self._made or self.clock is None:
            return []
        zero, seconds = self._made[0][0], self.clock.seconds
        waited = _add_up(stalls_s)
        return [
            SeenValue(
                bytes=self._sizes[number],
                made_s=seconds(zero, mark) - waited[stalls],
                used_s=seconds(zero, self._asked[number][0]) - waited[self._asked[number][1]]
                if number in self._asked
                else None,
                is_held=number in self.held,
            )
            for number, (mark, stalls) in enumerate(self._made)
        ]

    def passes_s(self, stalls_s: list[float]) -> list[float]:
        """When forward passed places without saving anything; by the same clock, under the same conditions."""
        if not self._made or self.clock is None:
            return []
        zero, waited = self._made[0][0], _add_up(stalls_s)
        return [self.clock.seconds(zero, mark) - waited[stalls] for mark, stalls in self._passed]


def _add_up(stalls_s: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(stalls_s, initial=0.0))
