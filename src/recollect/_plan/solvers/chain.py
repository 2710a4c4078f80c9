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
        stage = _Stage(np, size)
        for number, weighed in enumerate(options):
            needed = max(weighed.forward_bytes, weighed.backward_bytes) - budget_bytes
            first = max(0, needed) // unit  # whoever judges sees if that was too little
            step = (weighed.freed_bytes + unit // 2) // unit
            if first < size:
                stage.relax(costs[first:] + weighed.again_s, first, step, number)
        stages.append(stage)
        costs = stage.costs
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
    """What is known after a segment, by bytes freed so far, in units: the least time, and which option led there.

    Args:
        np: numpy.
        size: how many numbers of bytes there are.

    Attributes:
        costs: the least time.
    """

    def __init__(self, np: Any, size: int) -> None:
        self._np, self._last = np, size - 1
        self.costs = np.full(size, np.inf)
        self._choices = np.full(size, -1, dtype=np.int32)
        self._steps: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # of the two ends, which many places lead to: from which one

    def relax(self, reached: Any, first: int, step: int, number: int) -> None:
        """Take an option where it is quicker than what is known.

        Args:
            reached: the time with it, for each place from `first` on.
            first: the least that must have been freed before.
            step: how much it frees; less than nothing where it takes more.
            number: of the option.
        """
        self._steps[number] = step
        last, costs = self._last, self.costs
        stop = last + 1
        low = min(max(first, 1 - step), stop)  # from here to `high`: lead to places between the ends
        high = min(max(first, last - step), stop)
        if low < high:
            inner = reached[low - first : high - first]
            known = costs[low + step : high + step]
            self._np.copyto(self._choices[low + step : high + step], number, where=inner < known)
            self._np.minimum(known, inner, out=known)
        for end, start, until in ((0, first, low), (last, high, stop)):
            if start < until:
                part = reached[start - first : until - first]
                best = int(part.argmin())
                if part[best] < costs[end]:
                    costs[end], self._choices[end], self._ends[end] = part[best], number, start + best

    def trace(self, at: int) -> tuple[int, int]:
        """The option that led to a place, and from where."""
        number = int(self._choices[at])
        return number, self._ends[at] if at in self._ends else at - self._steps[number]


def _import_numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        raise ImportError(INSTALL) from None
    return np
