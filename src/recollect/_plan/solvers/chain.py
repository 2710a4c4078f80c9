"""Which option for which segment, so that the whole step stays under a budget: dynamic programming over freed bytes.

After the chain algorithms of Beaumont et al. ("Optimal checkpointing for heterogeneous chains", 2019), with one level:
the options of a segment are given, and what earlier segments have freed is all that a later one needs to know. Memory
at each point is taken to be the plain step's, less what segments before it have freed; `rehearse` judges whether that
is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect._plan.options import Weighed
from recollect._plan.solvers.highs import INSTALL

_BUCKETS = 4096


def choose_options(chain: Sequence[Sequence[Weighed]], rest_bytes: int, budget_bytes: int) -> list[Weighed] | None:
    """One option for each segment, the quickest together that fits.

    Args:
        chain: for each segment, in the order of forward, its options.
        rest_bytes: the most that the plain step takes after the last segment's forward and before its backward.
        budget_bytes: what must not be exceeded.

    Returns:
        The options, or None if nothing fits.
    """
    np = _import_numpy()
    most = max((max(w.forward_bytes, w.backward_bytes) for options in chain for w in options), default=0)
    wanted = max(rest_bytes, most) - budget_bytes
    if wanted <= 0:
        return [min(options, key=lambda w: w.again_s) for options in chain]
    unit = max(wanted // _BUCKETS, 1)
    size = wanted // unit + 2
    costs = np.full(size, np.inf)  # by bytes freed so far, in units; the last place is "enough for all"
    costs[0] = 0.0
    stages: list[_Stage] = []
    for options in chain:
        # Too little freed before an option that needs more: whoever judges sees it.
        moves = [
            (
                max(0, max(weighed.forward_bytes, weighed.backward_bytes) - budget_bytes) // unit,
                (weighed.freed_bytes + unit // 2) // unit,
                weighed.again_s,
            )
            for weighed in options
        ]
        stages.append(_Stage(np, costs, moves))
        costs = stages[-1].costs
    needed = max(0, rest_bytes - budget_bytes) // unit
    ends = costs[needed:]
    if not np.isfinite(ends).any():
        return None
    at = needed + int(np.argmin(ends))
    found: list[Weighed] = []
    for options, stage in zip(reversed(chain), reversed(stages), strict=True):
        number, at = stage.trace(at)
        found.append(options[number])
    return found[::-1]


def can_fit(chain: Sequence[Sequence[Weighed]], rest_bytes: int, budget_bytes: int) -> bool:
    """Whether any options of the segments fit together.

    Whoever has freed more can do whatever one who has freed less can, so it is enough to free as much as possible.
    """
    freed = 0
    for options in chain:
        most = max(
            (w.freed_bytes for w in options if max(w.forward_bytes, w.backward_bytes) - freed <= budget_bytes),
            default=None,
        )
        if most is None:
            return False
        freed += most
    return rest_bytes - freed <= budget_bytes


class _Stage:
    """What is known after a segment, by bytes freed so far, in units: the least time.

    Which option led to a place is found when somebody asks: that is a few places of thousands.

    Args:
        np: numpy.
        before: the least time before the segment.
        moves: of each option, the least that must have been freed before, how much it frees (less than nothing where it
            takes more), and how long it takes.

    Attributes:
        costs: the least time.
    """

    def __init__(self, np: Any, before: Any, moves: Sequence[tuple[int, int, float]]) -> None:
        self._before, self._moves, self._last = before, moves, len(before) - 1
        self.costs = costs = np.full(len(before), np.inf)
        known = int(np.flatnonzero(before < np.inf).max(initial=0)) + 1  # none has freed as much as that
        room = np.empty(known)
        first_s = last_s = float("inf")
        for first, step, seconds in moves:
            low, high = self._cut(first, step)
            stop = min(high, known)
            if low < stop:
                best = costs[low + step : stop + step]
                np.minimum(best, np.add(before[low:stop], seconds, out=room[: stop - low]), out=best)
            if first < low:
                first_s = min(first_s, float(before[first:low].min()) + seconds)
            if high < known:
                last_s = min(last_s, float(before[high:known].min()) + seconds)
        costs[0], costs[-1] = first_s, last_s

    def _cut(self, first: int, step: int) -> tuple[int, int]:
        """From where to where an option leads to places between the two ends: below and above many lead to one."""
        last = self._last
        low = first if first + step > 0 else min(1 - step, last + 1)
        high = max(low, last - step)
        return low, min(high, last + 1)

    def trace(self, at: int) -> tuple[int, int]:
        """The option that led to a place, and from where."""
        wanted = self.costs[at]
        for number, (first, step, seconds) in enumerate(self._moves):
            low, high = self._cut(first, step)
            if at in {0, self._last}:
                start, stop = (first, low) if not at else (high, self._last + 1)
            else:
                start = at - step
                stop = start + (low <= start < high)
            part = self._before[start:stop]
            if len(part) and part.min() + seconds == wanted:
                return number, start + int(part.argmin())
        message = "no option leads here"
        raise AssertionError(message)


def _import_numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        raise ImportError(INSTALL) from None
    return np
