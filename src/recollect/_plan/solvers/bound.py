"""How quick a step can be at all within a budget, if values are only recomputed.

Take any moment of backward. Whatever a schedule does, it holds then what the call reads and makes, what is there all
the time, and some of the values that later calls need; the rest of those it makes again. The least that takes, as a
linear program over the whole step, is a bound for every schedule: regions, modules and the order of backward play no
part in it. Two moments are tried: the turn from forward to backward, and the one that presses most. Offloading is not
bounded by it.
"""

from __future__ import annotations

from collections.abc import Collection

from recollect._core.calls import Category
from recollect._plan.problem import Problem, Run
from recollect._plan.solvers.program import IntegerProgram

_LASTING = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER, Category.OTHER)


class LowerBound:
    """The bound of one step, for any budget."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._programs = [] if problem.whole is None else _make_programs(problem, problem.whole)

    def seconds(self, budget_bytes: int) -> float | None:
        """The least time of the step; None if it cannot be told."""
        if not self._programs:
            return None
        plain, prices = self._problem.plain_s, self._problem.prices
        if budget_bytes >= self._problem.profile.peak_bytes:
            return plain
        least = [program.least_s(max(0, budget_bytes - fixed)) for program, fixed in self._programs]
        again = max((again for again in least if again is not None), default=0.0)
        if prices.plain is not None and prices.pace.counts_backward:  # what the device does last, it does once
            return max(plain, plain - (prices.plain.wall_s - prices.plain.host_s) + again)
        return plain + again


def _make_programs(problem: Problem, run: Run) -> list[tuple[IntegerProgram, int]]:
    """For the moments that are tried: what later calls need, and the bytes that are there in any case."""
    lasts: dict[int, int] = {}
    for moment, storages in run.asks:
        for storage in storages:
            if storage in run.makes:
                lasts[storage] = moment
    pressing, most = problem.forward_count, -1
    waiting = dict(sorted(lasts.items(), key=lambda item: -item[1]))
    waiting_bytes = sum(problem.sizes[storage] for storage in waiting)
    for moment in range(problem.forward_count, max(lasts.values(), default=problem.forward_count)):
        while waiting and next(reversed(waiting.values())) <= moment:
            storage, _ = waiting.popitem()
            waiting_bytes -= problem.sizes[storage]
        pressure = _count_fixed(problem, moment, waiting) + waiting_bytes
        if pressure >= most:
            pressing, most = moment, pressure
    found = []
    for moment in dict.fromkeys((problem.forward_count, pressing)):
        later = frozenset(storage for storage, last in lasts.items() if last > moment)
        found.append((IntegerProgram(problem, run, needs=later), _count_fixed(problem, moment, later)))
    return found


def find_least_bytes(problem: Problem) -> int:
    """What no schedule takes less than, found at once: some call reads and makes that much beside what stays."""
    return max(_count_fixed(problem, moment, ()) for moment in range(len(problem.calls)))


def find_lasting_bytes(problem: Problem) -> int:
    """What no batch is small enough to take less than: parameters, their gradients, optimizer state, other tensors."""
    storages = problem.profile.storages
    lasting = (at for at, one in enumerate(storages) if one.category in _LASTING and problem.is_lasting(at))
    return sum(problem.sizes[at] for at in lasting) + problem.profile.fixed_bytes


def _count_fixed(problem: Problem, moment: int, later: Collection[int]) -> int:
    """The bytes that are there at a call in any case: what lives through the step, what the call reads and makes."""
    call = problem.calls[moment]
    touched = {*problem.reads[moment], *(value.storage for value in call.outputs)}.difference(later)
    return (
        problem.profile.fixed_bytes
        + call.workspace_bytes
        + problem.lasting_bytes_at[moment]
        + sum(problem.sizes[at] for at in touched if not problem.is_lasting(at))
    )
