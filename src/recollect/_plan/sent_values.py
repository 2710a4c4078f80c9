"""Which of the values that a compiled step keeps go to host memory, and what that leaves of its peak.

A value is worth sending by the time between its making and its use: the first layers' have the most. So the first ones
go, as many as the budget asks for. The link sets a limit to that: what has not left when memory is scarce frees
nothing, and what comes back late is waited for. Both are told by the timetable by which graphs send them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from recollect._core.calls import Lifetime, OpCall
from recollect._core.profiles import Profile
from recollect._core.timetables import SeenValue
from recollect._plan.fusing import has_kernel
from recollect._plan.journeys import Absence, find_absences
from recollect._plan.simulate import Simulation

_LEAST_BYTES = 2**20  # each value costs the host some tens of microseconds, out and back
_LEAST_SHARE = 1 / 64  # of the largest
_SAME_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """What decides when values leave and come back.

    Attributes:
        bytes_per_s: what the link carries each way.
        seconds_of: how long the device takes for a call of a compiled graph, about.
    """

    bytes_per_s: float
    seconds_of: Callable[[OpCall], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Values that are sent, judged.

    Attributes:
        storages: which.
        simulation: the step without their memory while they are away.
        waits_s: how long the step waits for them.
    """

    storages: frozenset[int]
    simulation: Simulation
    waits_s: float


class Sending:
    """Judges what may be sent of the values that one schedule of a step keeps.

    Args:
        profile: the step.
        simulation: the schedule.
        kept: the storages that it keeps for backward.
        carrier: the link, and how fast the step runs beside it.
        least_bytes: smaller values stay; None for as large as is worth it.
    """

    def __init__(
        self,
        profile: Profile,
        simulation: Simulation,
        kept: Collection[int],
        carrier: Carrier,
        *,
        least_bytes: int | None = None,
    ) -> None:
        self._simulation, self._carrier = simulation, carrier
        calls, sizes = profile.calls, [storage.bytes for storage in profile.storages]
        seconds = [carrier.seconds_of(call) for call in calls]
        self._ends_s = list(itertools.accumulate(seconds[step.call] for step in simulation.steps))
        self._starts_s = [0.0, *self._ends_s[:-1]]
        self._passes_s = [
            end_s
            for step, end_s in zip(
                simulation.steps[: simulation.backward_start], self._ends_s[: simulation.backward_start], strict=True
            )
            if has_kernel(calls[step.call])
        ]
        made, used, last = _find_uses(profile, simulation)
        least = max((sizes[at] for at in kept), default=0) * _LEAST_SHARE if least_bytes is None else 0
        least = max(least, _LEAST_BYTES if least_bytes is None else least_bytes)
        self._found = sorted(
            (at for at in kept if at in made and at in used and profile.storages[at].lifetime is Lifetime.VALUE),
            key=made.__getitem__,
        )
        self.candidates = [at for at in self._found if sizes[at] >= least]
        self._sizes, self._made, self._used, self._last = sizes, made, used, last

    @property
    def forward_s(self) -> float:
        """How long forward takes."""
        return self._ends_s[self._simulation.backward_start - 1]

    @property
    def recomputed_s(self) -> float:
        """How long recomputation takes."""
        steps = zip(self._simulation.steps, self._starts_s, self._ends_s, strict=True)
        return sum(end_s - start_s for step, start_s, end_s in steps if step.again)

    def judge(self, sent: Collection[int]) -> Sent:
        """What sending some of them leaves, and costs."""
        seen = [
            SeenValue(
                bytes=self._sizes[at],
                made_s=self._ends_s[self._made[at]],
                used_s=self._starts_s[self._used[at]],
                is_held=at not in sent,
            )
            for at in self._found
        ]
        flying = sum(value.bytes for value in seen)
        away, waits_s = find_absences(seen, self._carrier.bytes_per_s, flying, self._passes_s)
        changes = [0] * (len(self._starts_s) + 1)
        for at, absence in zip(self._found, away, strict=True):
            if at in sent:
                gone, back = self._find_places(at, absence)
                changes[gone] -= self._sizes[at]
                changes[back] += self._sizes[at]
        bytes_at = tuple(map(sum, zip(self._simulation.bytes_at, itertools.accumulate(changes), strict=False)))
        return Sent(
            storages=frozenset(sent),
            simulation=replace(self._simulation, bytes_at=bytes_at),
            waits_s=waits_s,
        )

    def _find_places(self, storage: int, absence: Absence) -> tuple[int, int]:
        """From which step to before which a value takes no memory."""
        gone = max(bisect.bisect_left(self._starts_s, absence.gone_s - _SAME_S), self._last[storage] + 1)
        back = min(bisect.bisect_left(self._starts_s, absence.back_s - _SAME_S), self._used[storage])
        return (gone, back) if gone < back else (back, back)

    def send_within(self, budget_bytes: int | None) -> Sent:
        """As few of the first values as bring the peak within a budget; with None, as lower it most.

        If none does, all: whoever asks must look.
        """
        if budget_bytes is None:
            return min(map(self._send_first, self._steps()), key=lambda one: one.simulation.peak_bytes)
        low, high = 0, len(self.candidates)
        while low < high:
            middle = (low + high) // 2
            if self._send_first(middle).simulation.peak_bytes <= budget_bytes:
                high = middle
            else:
                low = middle + 1
        return self._send_first(low)

    def _steps(self) -> Sequence[int]:
        count = len(self.candidates)
        return range(0, count + 1, max(count // 16, 1))

    def _send_first(self, count: int) -> Sent:
        return self.judge(self.candidates[:count])


def _find_uses(profile: Profile, simulation: Simulation) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """For storages of forward: the step that makes each, the first of backward that reads it, the last of forward."""
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(simulation.steps):
        call = profile.calls[step.call]
        if at < simulation.backward_start:
            for value in call.outputs:
                made.setdefault(value.storage, at)
            last.update(dict.fromkeys((*call.reads, *(value.storage for value in call.outputs)), at))
        else:
            for storage in call.reads:
                used.setdefault(storage, at)
    return made, used, last
