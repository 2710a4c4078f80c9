"""Alternative: a plan that another budget would give, with its memory over the step. Plain data; no torch here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from recollect._core.forecasts import PlannedRegion

_STRETCHES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrack:
    """Bytes in use over a step, in stretches of time; of each stretch the most.

    Attributes:
        ends_s: when each stretch ends, from the start of the step.
        bytes: the most in use in each.
    """

    ends_s: tuple[float, ...]
    bytes: tuple[int, ...]

    @classmethod
    def of(cls, bytes_at: Sequence[int], seconds: Sequence[float], step_s: float) -> MemoryTrack:
        """The track of a step's calls, at most 400 stretches of it; no peak is lost.

        Args:
            bytes_at: in use while each call runs.
            seconds: that each call takes. Where nobody knows them, calls take equal parts of the step.
            step_s: that the step takes, which their sum is scaled to.

        >>> MemoryTrack.of([10, 30, 20], [1.0, 1.0, 2.0], step_s=8.0)
        MemoryTrack(ends_s=(2.0, 4.0, 8.0), bytes=(10, 30, 20))
        """
        taken = list(seconds) if sum(seconds) > 0 else [1.0] * len(bytes_at)
        scale = (step_s or 1.0) / (sum(taken) or 1.0)
        ends = [end * scale for end in itertools.accumulate(taken)]
        stretches: dict[int, tuple[float, int]] = {}
        for end, size, own in zip(ends, bytes_at, taken, strict=True):
            at = min(_STRETCHES - 1, int((end - own * scale / 2) / (ends[-1] or 1.0) * _STRETCHES))
            known = stretches.get(at, (0.0, 0))
            stretches[at] = (end, max(known[1], size))
        found = stretches.values()
        return cls(ends_s=tuple(end for end, _ in found), bytes=tuple(size for _, size in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What a budget would give.

    Attributes:
        peak_bytes: the most bytes in use at a time.
        step_s: how long the step takes.
        regions: the modules that become regions; none in the plain step.
        memory: over the step.
    """

    peak_bytes: int
    step_s: float
    regions: tuple[PlannedRegion, ...]
    memory: MemoryTrack
