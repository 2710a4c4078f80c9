"""A linear program of 0s and 1s, solved by HiGHS through scipy. Not needed until a plan is made."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

INSTALL = (
    'a plan needs scipy, whose HiGHS solver makes it, but scipy cannot be imported. Run: pip install "recollect[plan]"'
)
# HiGHS starts threads for half the processors, for each thread that calls it, and they spin: a program of milliseconds
# took several times as long. scipy hands an option that it does not know on, and warns.
_ALONE = {"threads": 1}
_NOTE = r"Unrecognized options detected: \{'threads'\}"


def import_scipy() -> Any:
    """The optimizers of scipy.

    Raises:
        ImportError: there is no scipy; it says what to install.
    """
    try:
        from scipy import optimize
    except ImportError:
        raise ImportError(INSTALL) from None
    return optimize


class Model:
    """Variables between 0 and 1, a cost for each, and rows that sums of them must satisfy.

    >>> model = Model()
    >>> kept, again = model.add(0.0), model.add(2.0)
    >>> _ = model.require({kept: 1.0, again: 1.0}, at_least=1.0)
    >>> room = model.require({kept: 10.0}, at_most=float("inf"))
    >>> [round(value) for value in model.solve(limits={room: 10.0})]
    [1, 0]
    >>> [round(value) for value in model.solve(limits={room: 9.0})]
    [0, 1]
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._most: list[float] = []
        self._entries: tuple[list[float], list[int], list[int]] = ([], [], [])
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._scales: list[float] = []
        self._matrix: Any = None

    def add(self, cost: float, *, most: float = 1.0) -> int:
        """A variable; gives its number."""
        self._costs.append(cost)
        self._most.append(most)
        return len(self._costs) - 1

    def require(self, row: dict[int, float], *, at_least: float = float("-inf"), at_most: float = float("inf")) -> int:
        """A row: a sum of variables, each times a factor, between two numbers; gives its number."""
        # Factors of a row add up to 1. So a solution whose variables are whole to within HiGHS' tolerance keeps every
        # row to within that, too. If one does not, HiGHS repairs it, and says so on stdout, asked or not (ERGO-Code/
        # HiGHS#2783); and where factors were bytes, it found no solution for one problem in 200.
        scale = sum(map(abs, row.values())) or 1.0
        for column, factor in row.items():
            self._entries[0].append(factor / scale)
            self._entries[1].append(len(self._lower))
            self._entries[2].append(column)
        self._lower.append(at_least / scale)
        self._upper.append(at_most / scale)
        self._scales.append(scale)
        self._matrix = None
        return len(self._lower) - 1

    def count(self, values: Sequence[float]) -> float:
        """What these values cost."""
        return float(sum(map(operator.mul, self._costs, values)))

    def solve(
        self,
        *,
        limits: dict[int, float] | None = None,
        more_costs: dict[int, float] | None = None,
        seconds: float = 10.0,
        is_whole: bool = True,
    ) -> list[float] | None:
        """The cheapest values; None if there are none, or none was found in time.

        Args:
            limits: other upper bounds for some rows.
            more_costs: what some variables cost in addition.
            seconds: when to stop and take the best so far.
            is_whole: whether each must be 0 or 1; else anything between.
        """
        optimize = import_scipy()
        from scipy.sparse import csr_array

        if not self._costs:
            return []
        if self._matrix is None:
            factors, rows, columns = self._entries
            self._matrix = csr_array((factors, (rows, columns)), shape=(len(self._lower), len(self._costs)))
        upper = list(self._upper)
        for row, most in (limits or {}).items():
            upper[row] = most / self._scales[row]
        costs = [cost + (more_costs or {}).get(column, 0.0) for column, cost in enumerate(self._costs)]
        scale = max(*costs, 1e-30)

        def call() -> Any:
            return optimize.milp(
                [cost / scale for cost in costs],
                integrality=1 if is_whole else 0,
                bounds=optimize.Bounds(0.0, self._most),
                constraints=optimize.LinearConstraint(self._matrix, self._lower, upper),
                options={"time_limit": seconds, "mip_rel_gap": 1e-3, **_ALONE},
            )

        _ignore_note()
        # A thread that has called HiGHS with more threads, for whoever, cannot have fewer: a new one can.
        with ThreadPoolExecutor(max_workers=1) as thread:
            found = thread.submit(call).result()
        return None if found.x is None else list(found.x)


def _ignore_note() -> None:
    """Ignore what scipy warns of here. Not by a context, which would undo what other threads have set meanwhile."""
    known = ("ignore", re.compile(_NOTE, re.IGNORECASE), RuntimeWarning, re.compile(re.escape(__name__)), 0)
    if known not in warnings.filters:
        warnings.filterwarnings("ignore", _NOTE, RuntimeWarning, re.escape(__name__))
