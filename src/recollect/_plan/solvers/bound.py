"""How quick a step can be at all within a budget, if values are only recomputed.

Take any moment of backward. Whatever a plan does, it holds then what the call reads and makes, all gradients that are
on their way, what is there all the time, and some of the values that later calls need; the rest of those it makes
again. The least that takes, as a linear program over the whole step, is a bound for every plan: regions and modules
play no part in it. Two moments are tried: the turn from forward to backward, and the one that presses most. Where a
later one has more there in any case, as attention that is composed has in the middle of a U-Net, the program has both.
Offloading is not bounded by it.
"""

from __future__ import annotations

from collections.abc import Collection

from recollect._core.calls import Category
from recollect._plan.presence import Presence
from recollect._plan.problem import Problem, Run
from recollect._plan.solvers.stages import Moment, StagedProgram

_LASTING = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER, Category.OTHER)


class LowerBound:
    """The bound of one step, for any budget."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._moments = None if problem.whole is None else _Moments(problem, problem.whole)

    def seconds(self, budget_bytes: int) -> float | None:
        """The least time of the step; None if it cannot be told."""
        if self._moments is None:
            return None
        plain, prices = self._problem.plain_s, self._problem.prices
        if budget_bytes >= self._problem.profile.peak_bytes:
            return plain
        again = self._moments.least_s(budget_bytes)
        if prices.plain is not None and prices.pace.counts_backward:  # what the device does last, it does once
            return max(plain, plain - (prices.plain.wall_s - prices.plain.host_s) + again)
        return plain + again


class _Moments:
    """The moments that are tried, and their programs."""

    def __init__(self, problem: Problem, run: Run) -> None:
        self._problem, self._run, self._turn = problem, run, problem.forward_count
        lasts: dict[int, int] = {}
        for moment, storages in run.asks:
            lasts.update({storage: moment for storage in storages if storage in run.makes})
        self._presence = Presence(problem, run)
        self._bytes = self._presence.bytes_at
        self._end = max(lasts.values(), default=self._turn)
        self._pressure = self._presence.add_needed(lasts)[: self._end - self._turn]
        self._pressing = max(enumerate(self._pressure), key=lambda one: one[::-1], default=(0, 0))[0]
        self._programs: dict[tuple[int, ...], StagedProgram] = {}

    def least_s(self, budget_bytes: int) -> float:
        """The least that recomputation takes."""
        tried = {(0,), (self._pressing,), (self._pressing, *self._find_later(budget_bytes))}
        least = [self._program(places).least_s(budget_bytes) for places in tried]
        return max((again for again in least if again is not None), default=0.0)

    def _find_later(self, budget_bytes: int) -> list[int]:
        """A later moment that does not fit without recomputation either, and has more there in any case."""
        places = range(self._pressing + 1, len(self._pressure))
        found = [(self._bytes[at], at) for at in places if self._pressure[at] > budget_bytes]
        return [at for size, at in [max(found)] if size > self._bytes[self._pressing]] if found else []

    def _program(self, places: tuple[int, ...]) -> StagedProgram:
        if places not in self._programs:
            moments = [
                Moment(call=self._turn + at, there=self._presence.list_there(self._turn + at), bytes=self._bytes[at])
                for at in places
            ]
            self._programs[places] = StagedProgram(self._problem, self._run, moments)
        return self._programs[places]


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
