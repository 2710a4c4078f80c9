"""The least recomputation if at several moments of backward only so much can be held: stage after stage, one program.

A stage begins at a moment. What is held there must have been held at the one before, or be made again in between. Each
stage has the rows of the program for a single moment, and so have all of them together: without these, a relaxed
program could make half of a call in one stage and half in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recollect._plan.problem import Problem, Run
from recollect._plan.solvers.highs import Model
from recollect._plan.solvers.program import IntegerProgram, Placed

_LONGEST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A call of backward, and what is there while it runs whatever is kept.

    Attributes:
        call: which.
        there: the storages.
        bytes: how many bytes that is, workspace included.
    """

    call: int
    there: frozenset[int]
    bytes: int


class StagedProgram:
    """What recomputation takes at least, relaxed to a linear program.

    Args:
        problem: the step.
        run: all of its forward.
        moments: some, in order.
    """

    def __init__(self, problem: Problem, run: Run, moments: Sequence[Moment]) -> None:
        self._model = Model()
        asks: dict[int, list[int]] = {}
        for call, storages in run.asks:
            for storage in storages:
                if storage in run.makes:
                    asks.setdefault(storage, []).append(call)
        self._limits: list[tuple[int, int]] = []
        stages: list[Placed] = []
        for moment, stop in zip(moments, [*(one.call for one in moments[1:]), len(problem.calls)], strict=True):
            later = frozenset(storage for storage, own in asks.items() if own[-1] > moment.call)
            needs = frozenset(storage for storage in later if any(moment.call < call <= stop for call in asks[storage]))
            program = IntegerProgram(problem, run, needs=needs, later=later, there=moment.there)
            stages.append(program.place(self._model))
            sizes = {stages[-1].kept[at]: float(size) for at, size in program.sizes.items() if at not in moment.there}
            self._limits.append((self._model.require(sizes), moment.bytes))
            if len(stages) > 1:
                self._follow(run, *stages[-2:])
        if len(stages) > 1:
            later = frozenset(storage for storage, own in asks.items() if own[-1] > moments[0].call)
            whole = IntegerProgram(problem, run, needs=later, there=moments[0].there)
            made = whole.place(self._model, stages[0].kept)
            for call, at in made.again.items():
                own = {stage.again[call]: 1.0 for stage in stages if call in stage.again}
                self._model.require({at: -1.0, **own}, at_least=0.0)

    def _follow(self, run: Run, before: Placed, stage: Placed) -> None:
        """What a stage begins with was there when the one before began, or that has made it again."""
        for storage, at in stage.kept.items():
            if storage not in before.kept:
                continue
            makers = [before.again[call] for call in run.makes.get(storage, ()) if call in before.again]
            for maker in makers or (None,):
                made = {} if maker is None else {maker: 1.0}
                self._model.require({before.kept[storage]: 1.0, **made, at: -1.0}, at_least=0.0)

    def least_s(self, budget_bytes: int) -> float | None:
        """The seconds that any schedule takes at least that stays within so many bytes; None if none was found."""
        limits = {row: float(max(0, budget_bytes - there)) for row, there in self._limits}
        values = self._model.solve(limits=limits, seconds=_LONGEST_S, is_whole=False)
        return None if values is None else self._model.count(values)
