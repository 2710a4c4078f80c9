"""A minimum cut whose edges cost seconds or bytes, for one price of a byte after the other, found by scipy.

A cut is found several times as quickly as HiGHS solves the linear program that says the same, and on one thread: HiGHS
starts as many as half the processors have cores, for each thread that calls it, and these take turns at doing nothing.
"""

from __future__ import annotations

from typing import Any

from recollect._plan.solvers.highs import import_scipy

SOURCE, SINK = 0, 1
_TOTAL, _NEVER = 1 << 28, 1 << 29  # in numbers of 32 bits: all seconds together, and what is more than that


class Network:
    """Nodes on the side of the source or of the sink, and what it costs if an edge leads from the one to the other.

    >>> network = Network()
    >>> again = network.add()
    >>> network.connect(SOURCE, again, bytes=10)
    >>> network.connect(again, SINK, seconds=2.0)
    >>> again in network.cut(0.1), again in network.cut(0.3)
    (False, True)
    """

    def __init__(self) -> None:
        self._count = 2
        self._edges: dict[tuple[int, int], tuple[float, float]] = {}
        self._prepared: Any = None

    def add(self) -> int:
        """A node; gives its number."""
        self._count += 1
        return self._count - 1

    def connect(self, start: int, end: int, *, seconds: float = 0.0, bytes: float = 0.0) -> None:  # noqa: A002
        """What it costs if the start is with the source and the end is not: infinite seconds if that must not be."""
        if start != end:
            known = self._edges.get((start, end), (0.0, 0.0))
            self._edges[start, end] = (known[0] + seconds, known[1] + bytes)
            self._prepared = None

    def cut(self, seconds_per_byte: float) -> set[int] | None:
        """The nodes on the side of the source in a cheapest cut; of several such cuts, as few as can be.

        None if each cut costs more than all seconds there are: bytes that no cut spares have too high a price to tell
        seconds apart beside them.
        """
        import_scipy()
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if self._prepared is None:
            self._prepared = self._prepare(np)
        starts, ends, seconds, sizes, scale = self._prepared
        capacities = np.minimum(np.rint((seconds + sizes * seconds_per_byte) * scale), _NEVER).astype(np.int32)
        graph = csr_array((capacities, ends, starts), shape=(self._count, self._count))
        left = graph - maximum_flow(graph, SOURCE, SINK).flow  # without the edges that are full
        side = np.zeros(self._count, dtype=bool)
        side[breadth_first_order(left, SOURCE, return_predecessors=False)] = True
        is_cut = np.repeat(side, np.diff(starts)) & ~side[ends]
        if capacities[is_cut].sum(dtype=np.int64) >= _NEVER:
            return None
        return set(np.flatnonzero(side).tolist())

    def _prepare(self, np: Any) -> tuple[Any, ...]:
        """The edges by rows, what each costs, and how many units of capacity a second is."""
        places = sorted(self._edges)
        starts = np.searchsorted([start for start, _ in places], np.arange(self._count + 1)).astype(np.int32)
        ends = np.array([end for _, end in places], dtype=np.int32)
        seconds, sizes = np.array([self._edges[place] for place in places], dtype=np.float64).reshape(-1, 2).T
        total = seconds[np.isfinite(seconds)].sum()
        return starts, ends, seconds, sizes, _TOTAL / max(total, 1e-30)
