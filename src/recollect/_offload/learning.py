"""Learning: what a step showed becomes the timetable of the next, and the report of what offloading does."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from recollect._core.timetables import SeenValue, Speeds, Timetable, make_timetable
from recollect._offload.accounts import Accounts, OffloadReport
from recollect._offload.compression import Compression
from recollect._offload.steps import Lesson, Lessons, SeenStep
from recollect._offload.streams import StreamClock
from recollect._offload.transfers import Transfers

_log = logging.getLogger("recollect")

LEARNING_STEPS = 2  # measured with the host waiting for the last mark; the first is slow for other reasons
MEASURED_STEPS = 4
_MEASURED_EVERY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a session is to behave.

    Attributes:
        min_bytes: smaller values stay.
        in_flight: most bytes on their way at a time, each way.
        waits: whether the step may wait for copies; if not, only what the link can carry beside forward is sent.
        compression: what values pass through.
    """

    min_bytes: int
    in_flight: int
    waits: bool
    compression: Compression


class Learner:
    """What a session has learnt.

    Attributes:
        lessons: of steps.
        steps: how many there were.
        slow_steps: how many of those measured last waited longer for copies than recomputing takes, one after another.
    """

    def __init__(self, tier: str, options: SessionOptions, transfers: Transfers) -> None:
        self._tier, self._options, self._transfers = tier, options, transfers
        self.lessons = Lessons()
        self.steps = self.slow_steps = 0
        self._measured = OffloadReport(tier=tier)
        self._counted: tuple[int, Accounts] | None = None  # of a later step that was not measured

    @property
    def report(self) -> OffloadReport:
        """Of the last step: what was counted there, and the times as last measured."""
        return self._measured if self._counted is None else self._measured.with_counts(*self._counted)

    @property
    def is_learning(self) -> bool:
        """Whether the host waits for the present step to be read."""
        return self.steps <= LEARNING_STEPS

    def count(self) -> bool:
        """One more step begins; says whether it is to be measured."""
        self.steps += 1
        return self.steps <= MEASURED_STEPS or self.steps % _MEASURED_EVERY == 0

    def close(self, step: SeenStep, *, waits: bool) -> bool:
        """Learn from a step, unless its marks have not been reached and nobody wants to wait; says whether it did."""
        if step.is_closed:
            return True
        accounts, clock, last = step.accounts, step.clock, step.last_mark()
        if clock is None or last is None:
            step.is_closed, self._counted = True, (self.steps, accounts)
            return True
        if waits:
            clock.wait(last)
        elif not clock.is_past(last):
            return False
        step.is_closed = True
        try:
            self._measure(step, clock)
        except RuntimeError as error:  # of marks on several devices, whose clocks are not one
            _log.debug("a step could not be measured: %s", error)
            self._counted = (self.steps, accounts)
        return True

    def _measure(self, step: SeenStep, clock: StreamClock) -> None:
        accounts = step.accounts
        stalls_s = accounts.stall_seconds()
        values = step.seen(stalls_s)
        out, back, copy_s = accounts.speeds(clock)
        self._learn(step, tuple(values), tuple(step.passes_s(stalls_s)), Speeds(out=out or 0.0, back=back or 0.0))
        pinned_bytes = 0 if self._transfers.host is None else self._transfers.host.pool.held_bytes
        self._counted, self._measured = (
            None,
            OffloadReport(
                tier=self._tier,
                copy_s=copy_s,
                stall_s=sum(stalls_s) + accounts.host_stall_s,
                forward_s=max((value.made_s for value in values), default=0.0),
                out_bytes_per_s=out or self._measured.out_bytes_per_s,
                back_bytes_per_s=back or self._measured.back_bytes_per_s,
                pinned_bytes=pinned_bytes,
            ).with_counts(self.steps, accounts),
        )
        self.slow_steps = self.slow_steps + 1 if self._measured.is_slower_than_recomputing else 0

    def _learn(self, step: SeenStep, values: tuple[SeenValue, ...], passes_s: tuple[float, ...], seen: Speeds) -> None:
        """Of speeds those that are 0 were not seen."""
        known = self.lessons.about(tuple(step.kinds))
        out = seen.out or (known.speeds.out if known is not None else 0.0)
        back = seen.back or (known.speeds.back if known is not None else 0.0) or out
        if not out or not back or len(values) != len(step.kinds) or not step.has_backward:
            return
        speeds = Speeds(out=out, back=back)
        times_seen = 1 if known is None else known.times_seen + 1
        if known is not None:  # what was held stays held: it was not sent since, so nobody could see it
            pairs = zip(values, known.values, strict=True)
            values = tuple(replace(now, is_held=now.is_held or before.is_held) for now, before in pairs)
        table, has_room = None, None if known is None else known.has_room
        if self.steps % _MEASURED_EVERY == 0:
            has_room = None  # once in a while what is sent may grow
        if self._options.waits or times_seen >= LEARNING_STEPS:
            table = self._make_timetable(values, speeds, has_room, passes_s)
            if has_room is None and times_seen >= LEARNING_STEPS:
                has_room = table.sends
                self._pin(values, has_room)
        self.lessons.add(
            Lesson(
                kinds=tuple(step.kinds),
                values=values,
                speeds=speeds,
                timetable=table,
                times_seen=times_seen,
                has_room=has_room,
                passes_s=passes_s,
            )
        )

    def _make_timetable(
        self,
        values: tuple[SeenValue, ...],
        speeds: Speeds,
        has_room: tuple[bool, ...] | None,
        passes_s: tuple[float, ...],
    ) -> Timetable:
        """For the next step. Once room is pinned, only what it was pinned for is sent."""
        pool = None if self._transfers.host is None or self._transfers.slow is not None else self._transfers.host.pool
        return make_timetable(
            values,
            speeds,
            in_flight=self._options.in_flight,
            waits=self._options.waits,
            most_bytes=None if pool is None else pool.limit,
            has_room=has_room,
            passes_s=passes_s,
        )

    def _pin(self, values: tuple[SeenValue, ...], sends: tuple[bool, ...]) -> None:
        """Pin what a step will need, so that later ones pin nothing."""
        if self._transfers.host is not None:
            sizes = (value.bytes for value, is_sent in zip(values, sends, strict=True) if is_sent)
            self._transfers.host.pool.reserve(sizes)
