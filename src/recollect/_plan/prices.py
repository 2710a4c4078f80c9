"""What calls, and what regions do beyond them, add to a step: the host and the device work side by side.

Of the two, the one counts that the other waits for, and that may be the host in forward and the device in backward. So
there are three paces, and candidates are made for each that occurs; how long a candidate takes is then told by letting
both work through all of its calls.
"""

from __future__ import annotations

import enum
import itertools
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recollect._core.calls import OpCall, Phase
from recollect._core.profiles import Profile
from recollect._core.queues import Queued, find_joins, queue


class Pace(enum.Enum):
    """What sets the pace of a step: the device throughout, the host in forward only, or the host throughout."""

    DEVICE = "device"
    FORWARD = "host in forward"
    HOST = "host"

    @property
    def counts_forward(self) -> bool:
        """Whether what the host does in forward makes the step longer."""
        return self is not Pace.DEVICE

    @property
    def counts_backward(self) -> bool:
        """Whether what the host does in backward makes the step longer; if not, what the device does."""
        return self is Pace.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What regions add to a step, whatever sets its pace.

    Attributes:
        calls: the forward calls that run again.
        forward_s: what the host does beyond calls, in forward.
        backward_s: likewise, in backward.
        waits_s: how long the step waits for what was sent away.
    """

    calls: Sequence[int] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    waits_s: float = 0.0


class Prices:
    """What the calls of a step cost.

    Attributes:
        seconds: what each call adds to the step, as those that do the same do.
        device_s: likewise, what the device takes for it.
        host_s: likewise, what the host takes to launch it; 0 where the host runs the step itself.
        plain: how host and device work through the plain step; None if the host runs the step itself.
        pace: what sets the pace; whoever makes candidates for another one sets that.
    """

    def __init__(self, profile: Profile) -> None:
        calls = profile.calls
        self.seconds = _smooth(calls, [call.seconds for call in calls])
        self.device_s = _smooth(calls, [call.device_s for call in calls])
        self.host_s = _smooth(calls, [call.host_s for call in calls])
        self._joins = set(find_joins(calls, profile.storages))
        self._turn = profile.forward_count
        self._end = next((at for at, call in enumerate(calls) if call.phase is Phase.OPTIMIZER), len(calls))
        is_on_host = profile.host_s is None or profile.device_s is None
        self.plain: Queued | None = None if is_on_host else queue(self.host_s, self.device_s, sorted(self._joins))
        self.pace = self.read_pace(range(len(calls)), self.plain)

    def again_s(self, call: int) -> float:
        """What it costs to make a forward call again, at this pace."""
        return self._again_s[call]

    @property
    def _again_s(self) -> list[float]:
        if self.plain is None:
            return self.seconds
        return self.host_s if self.pace.counts_backward else self.device_s

    def sum_up(self, added: Added) -> float:
        """How much longer the step takes at this pace, if nothing but what is added matters."""
        own_s = sum(map(self._again_s.__getitem__, added.calls)) + added.waits_s
        forward_s = added.forward_s if self.pace.counts_forward else 0.0
        return own_s + forward_s + (added.backward_s if self.pace.counts_backward else 0.0)

    def find_spare(self) -> list[float]:
        """For each call of forward, what the host can do more up to it until the device waits; one more, for none."""
        spare = map(operator.sub, self.device_s[: self._turn], self.host_s[: self._turn])
        return list(itertools.accumulate(spare, initial=0.0))

    def queue(self, steps: Sequence[int], more: Iterable[tuple[Sequence[int], float]]) -> Queued:
        """How host and device work through steps.

        Args:
            steps: the call of each.
            more: some steps, and what the host does for each of them beyond launching.
        """
        host_s = list(map(self.host_s.__getitem__, steps))
        for some, seconds in more:
            for step in some:
                host_s[step] += seconds
        joins = [step for step, call in enumerate(steps) if call in self._joins] if self._joins else ()
        return queue(host_s, list(map(self.device_s.__getitem__, steps)), joins)

    def read_pace(self, places: Sequence[int], queued: Queued | None) -> Pace:
        """What set the pace where host and device worked through steps.

        Args:
            places: for each call of the plain step, the step at which it runs for the first time.
            queued: how they did.
        """
        if queued is None:
            return Pace.HOST
        last = queued.last_wait
        turn, end = (places[call] if call < len(places) else queued.count for call in (self._turn, self._end))
        if last >= (turn + end) // 2:
            return Pace.HOST
        return Pace.FORWARD if last >= turn // 2 else Pace.DEVICE


def _smooth(calls: Sequence[OpCall], seconds: Sequence[float | None]) -> list[float]:
    """For each call the median time of those that do the same: a single one may have been held up by anything."""
    alike: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    keys = [
        (call.op, *((value.shape, value.dtype) for value in call.inputs), *(value.shape for value in call.outputs))
        for call in calls
    ]
    for key, one in zip(keys, seconds, strict=True):
        alike[key].append(one or 0.0)
    medians = {key: statistics.median(times) for key, times in alike.items()}
    return [medians[key] for key in keys]
