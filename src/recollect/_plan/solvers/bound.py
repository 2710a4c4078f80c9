"""How quick a step can be at all within a budget, if values are only recomputed.

Whatever a schedule does, at the end of forward it holds some values within the budget, and what backward needs beyond
those it makes again. The least that takes, as a linear program over the whole step, is a bound for every schedule:
regions, modules and the order of backward play no part in it. Offloading is not bounded by it.
"""

from __future__ import annotations

from recollect._plan.problem import Problem
from recollect._plan.solvers.keep_sets import Program


class Bound:
    """The bound of one step, for any budget."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._runs = problem.runs_of("")
        self._program = Program(problem, self._runs[0], is_bound=True) if len(self._runs) == 1 else None
        turn = problem.forward_count
        levels = problem.profile.timeline.bytes_at[turn - 1 : turn + 1]
        held = self._program.plain_bytes if self._program is not None else 0
        self._fixed = max(0, min(levels) - held)

    def seconds(self, budget_bytes: int) -> float | None:
        """The least time of the step; None if it cannot be told."""
        if self._program is None:
            return None
        plain = self._problem.plain_s
        if budget_bytes >= self._problem.profile.peak_bytes:
            return plain
        again = self._program.least_s(max(0, budget_bytes - self._fixed))
        return None if again is None else plain + again
