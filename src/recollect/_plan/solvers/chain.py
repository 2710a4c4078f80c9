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
    choices: list[Any] = []
    origins: list[Any] = []
    for options in chain:
        after = np.full(size, np.inf)
        choice = np.full(size, -1, dtype=np.int32)
        origin = np.zeros(size, dtype=np.int32)
        for number, weighed in enumerate(options):
            needed = max(weighed.forward_bytes, weighed.backward_bytes) - budget_bytes
            first = max(0, needed) // unit  # whoever judges sees if that was too little
            reached = costs[first:] + weighed.again_s
            step = (weighed.freed_bytes + unit // 2) // unit
            sources = np.arange(first, size)
            targets = np.clip(sources + step, 0, size - 1)
            _relax(np, after, choice, origin, (targets, reached, sources, number))
        choices.append(choice)
        origins.append(origin)
        costs = after
    needed = max(0, rest_bytes - budget_bytes) // unit
    ends = costs[needed:]
    if not np.isfinite(ends).any():
        return None
    at = needed + int(np.argmin(ends))
    found: list[Weighed] = []
    for options, choice, origin in zip(reversed(chain), reversed(choices), reversed(origins), strict=True):
        found.append(options[int(choice[at])])
        at = int(origin[at])
    return found[::-1]


def _relax(np: Any, after: Any, choice: Any, origin: Any, moves: tuple[Any, Any, Any, int]) -> None:
    """Take the moves that are cheaper than what is known. Only the last place can be reached by several of them."""
    targets, reached, sources, number = moves
    if not len(targets):
        return
    last = len(after) - 1
    inner = targets < last
    better = np.zeros(len(targets), dtype=bool)
    better[inner] = reached[inner] < after[targets[inner]]
    overflow = np.flatnonzero(~inner)
    if len(overflow):
        cheapest = overflow[np.argmin(reached[overflow])]
        better[cheapest] = reached[cheapest] < after[last]
    chosen = targets[better]
    after[chosen] = reached[better]
    choice[chosen] = number
    origin[chosen] = sources[better]


def _import_numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        raise ImportError(INSTALL) from None
    return np
