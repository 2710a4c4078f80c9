"""All that is worth choosing for a step, quickest first: made once, asked for any budget.

Solvers and standard policies give candidates, `rehearse` judges them, and those stay that no other beats in both peak
and time. A budget is answered by the quickest of them that fits. So the predicted time never rises with the budget, and
no plan is worse than a standard policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from recollect._plan.options import Option
from recollect._plan.prices import Pace
from recollect._plan.problem import Problem
from recollect._plan.recipes import Recipe, find_bases, group_alike, list_away, list_recipes
from recollect._plan.rehearse import rehearse
from recollect._plan.segments import Segment, find_chains
from recollect._plan.ways import can_replay

_EXPECTED = 50  # candidates for each chain
_PLAIN, _PLANNED = "plain", "planned"
_REFINEMENTS, _FAR = 2, 60
_STRIDE = 6  # of a recipe's budgets, at first
_CLOSE = 0.004  # of the plain step: between two budgets at which a recipe is no closer to the frontier it is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A candidate, judged.

    Attributes:
        choice: what becomes of which segments; those that are not there stay as they are.
        peak_bytes: the most bytes in use at a time.
        step_s: how long the step takes.
        peak_call: the call of the profile at which the peak is.
        name: what made it: a solver, or a standard policy.
        pace: what the step waits for.
    """

    choice: tuple[tuple[Segment, Option], ...]
    peak_bytes: int
    step_s: float
    peak_call: int
    name: str
    pace: Pace = Pace.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The candidates that none beats, by peak from the highest to the lowest; each takes longer than the one before.

    Attributes:
        points: these.
        candidates: all that was judged, under its name.
    """

    points: tuple[Point, ...]
    candidates: tuple[Point, ...]

    def fastest_within(self, budget_bytes: int) -> Point | None:
        """The quickest that takes no more; None if none does."""
        return next((point for point in self.points if point.peak_bytes <= budget_bytes), None)

    @property
    def standard(self) -> tuple[Point, ...]:
        """What standard policies give, for comparison."""
        return tuple(point for point in self.candidates if point.name not in (_PLAIN, _PLANNED))

    @property
    def smallest(self) -> Point:
        """The one with the lowest peak."""
        return self.points[-1]


Candidates = Callable[[Sequence[Segment]], Iterable[tuple[str, list[tuple[Segment, Option]]]]]
"""Gives standard choices for a chain of segments, each with its name."""


def find_frontier(
    problem: Problem,
    *,
    candidates: Candidates | None = None,
    known: Frontier | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Frontier:
    """Make candidates for a step and judge them.

    Args:
        problem: the step.
        candidates: gives standard choices for a chain of segments, each with its name.
        known: what was found for the same step without a link, if this one has one: that is as good here.
        progress: called with the number of candidates judged, and how many there will be at least.
    """
    search = _Search(problem, known, progress)
    search.judge(_PLAIN, ())
    chains = find_chains(problem)
    search.expected = len(chains) * _EXPECTED
    if all(can_replay(problem, segment.runs[0]) for chain in chains[:1] for segment in chain):
        chains = chains[:1]  # whatever parts of blocks can be made to do, replay of the block does
    chains = [*chains[:1], *(chain for chain in chains[1:] if not _treats_experts_apart(problem, chains[0], chain))]
    for chain in chains:
        for name, choice in candidates(chain) if candidates is not None and known is None else ():
            search.judge(name, choice)
        for choice in list_away(problem, chain):
            search.judge(_PLANNED, choice)
    pace, tried = problem.prices.pace, set[Pace]()
    try:
        while wanted := search.find_paces().difference(tried):
            problem.prices.pace = min(wanted, key=list(Pace).index)
            tried.add(problem.prices.pace)
            for chain in chains:
                search.explore_chain(chain)
    finally:
        problem.prices.pace = pace
    for _ in range(_REFINEMENTS):
        search.solve(list(search.find_between()))
    return Frontier(points=_without_worse(search.judged), candidates=tuple(search.judged))


def _treats_experts_apart(problem: Problem, blocks: Sequence[Segment], chain: Sequence[Segment]) -> bool:
    """Whether segments of a chain are parts of a block that it makes as large as it chooses: see `group_alike`."""
    for block in blocks:
        inside = [segment for segment in chain if segment.path.startswith(f"{block.path}.")]
        if len(group_alike(problem, block, inside)) < len(inside):
            return True
    return False


class _Search:
    """The candidates that were judged so far, and how they were made."""

    def __init__(self, problem: Problem, known: Frontier | None, progress: Callable[[int, int], None] | None) -> None:
        self.judged: list[Point] = [] if known is None else list(known.candidates)
        self.expected = 0
        self._problem, self._progress = problem, progress
        self._seen = {_key_of(point.choice): point for point in self.judged}
        self._recipes: dict[int, tuple[Recipe, int]] = {}  # by the id of a point: how it was made, for how many bytes

    def judge(self, name: str, choice: Iterable[tuple[Segment, Option]]) -> Point:
        """Judge a candidate, unless it is known."""
        problem = self._problem
        treated = tuple((segment, option) for segment, option in choice if option.acts)
        key = _key_of(treated)
        if key in self._seen:
            return self._seen[key]
        found = rehearse(problem, [pair for segment, option in treated for pair in option.treat(problem, segment)])
        point = Point(
            choice=treated,
            peak_bytes=found.peak_bytes if treated else problem.plain.peak_bytes,
            step_s=found.step_s if treated else problem.plain_s,
            peak_call=found.peak_call,
            name=name,
            pace=found.pace,
        )
        self.judged.append(point)
        self._seen[key] = point
        if self._progress is not None:
            self._progress(len(self.judged), max(self.expected, len(self.judged)))
        return point

    def solve(self, wishes: Iterable[tuple[Recipe, int]]) -> list[Point]:
        """Judge what recipes give for so many bytes."""
        points = []
        for recipe, wanted in wishes:
            points.append(self.judge(_PLANNED, recipe.choose(wanted)))
            self._recipes.setdefault(id(points[-1]), (recipe, wanted))
        return points

    def explore(self, recipe: Recipe) -> None:
        """Judge what a recipe gives for its budgets: for some of them, then for those between that may be worth it."""
        budgets = recipe.budgets
        places = sorted({*range(0, len(budgets), _STRIDE), len(budgets) - 1})
        points = self.solve((recipe, budgets[place]) for place in places)
        frontier = Frontier(points=_without_worse(self.judged), candidates=())
        is_close = [self._is_close(point, frontier) for point in points]
        for (low, high), ends in zip(itertools.pairwise(places), itertools.pairwise(is_close), strict=True):
            if any(ends):
                self.solve((recipe, budget) for budget in budgets[low + 1 : high])

    def explore_chain(self, chain: Sequence[Segment]) -> None:
        """Judge what recipes along a chain give, from all that they may begin with."""
        for base in find_bases(self._problem, chain):
            rest = [segment for segment in chain if all(segment is not one for one, _ in base)]
            self.judge(_PLANNED, base)
            treated = [pair for segment, option in base for pair in option.treat(self._problem, segment)]
            plain = rehearse(self._problem, treated)
            for recipe in list_recipes(self._problem, rest, plain, base) if rest else ():
                self.explore(recipe)

    def _is_close(self, point: Point, frontier: Frontier) -> bool:
        best = frontier.fastest_within(point.peak_bytes)
        return best is not None and point.step_s - best.step_s <= _CLOSE * self._problem.plain_s

    def find_paces(self) -> set[Pace]:
        """The paces of what is on the frontier: candidates are to be made for these."""
        return {point.pace for point in _without_worse(self.judged)}

    def find_between(self) -> Iterator[tuple[Recipe, int]]:
        """What to try where two neighbours of the frontier are far apart: what made the two, for the bytes between."""
        points = _without_worse(self.judged)
        far = (points[0].peak_bytes - points[-1].peak_bytes) / _FAR
        for high, low in itertools.pairwise(points):
            if high.peak_bytes - low.peak_bytes > far:
                middle = (high.peak_bytes + low.peak_bytes) // 2
                for end in (high, low):
                    if id(end) in self._recipes:
                        recipe, wanted = self._recipes[id(end)]
                        yield recipe, wanted + middle - end.peak_bytes


def _key_of(choice: Iterable[tuple[Segment, Option]]) -> tuple[tuple[str, Option], ...]:
    return tuple((segment.path, option) for segment, option in choice)


def _without_worse(points: Sequence[Point]) -> tuple[Point, ...]:
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.step_s, point.peak_bytes)):
        if not found or point.peak_bytes < found[-1].peak_bytes:
            found.append(point)
    return tuple(found)
