"""All that is worth choosing for a step, quickest first: made once, asked for any budget.

Solvers and standard policies give candidates, `rehearse` judges them, and those stay that no other beats in both peak
and time. A budget is answered by the quickest of them that fits. So the predicted time never rises with the budget, and
no plan is worse than a standard policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from recollect._plan.journeys import IN_FLIGHT_BYTES
from recollect._plan.options import PLAIN, Option, Weighed, move, weigh, without_worse
from recollect._plan.problem import Problem
from recollect._plan.rehearse import Rehearsal, Way, find_sent, rehearse
from recollect._plan.segments import Segment, find_chains
from recollect._plan.solvers.chain import choose_options
from recollect._plan.solvers.keep_sets import find_keep_sets, find_served_sets
from recollect._plan.ways import can_replay

_BUDGETS = 40
_NARROWINGS = 12
_FEWER_BUDGETS = 16
_BACKLOGS_BYTES = (IN_FLIGHT_BYTES, 2 * IN_FLIGHT_BYTES, 4 * IN_FLIGHT_BYTES)
_SENT_SHARES = (0.34, 0.67, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A candidate, judged.

    Attributes:
        choice: what becomes of which segments; those that are not there stay as they are.
        peak_bytes: the most bytes in use at a time.
        step_s: how long the step takes.
        peak_call: the call of the profile at which the peak is.
        name: what made it: a solver, or a standard policy.
    """

    choice: tuple[tuple[Segment, Option], ...]
    peak_bytes: int
    step_s: float
    peak_call: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The candidates that none beats, by peak from the highest to the lowest; each takes longer than the one before.

    Attributes:
        points: these.
        candidates: all that was judged, under its name: standard policies, for comparison.
    """

    points: tuple[Point, ...]
    candidates: tuple[Point, ...]

    def fastest_within(self, budget_bytes: int) -> Point | None:
        """The quickest that takes no more; None if none does."""
        return next((point for point in self.points if point.peak_bytes <= budget_bytes), None)

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
    progress: Callable[[int, int], None] | None = None,
) -> Frontier:
    """Make candidates for a step and judge them.

    Args:
        problem: the step.
        candidates: gives standard choices for a chain of segments, each with its name.
        progress: called with the number of candidates judged, and how many there will be at least.
    """
    judged: list[Point] = []
    seen: set[tuple[tuple[str, Option], ...]] = set()
    chains = find_chains(problem)
    expected = 1 + len(chains) * (_BUDGETS + 1)

    def judge(name: str, choice: Iterable[tuple[Segment, Option]]) -> Point | None:
        treated = tuple((segment, option) for segment, option in choice if option.way is not None)
        key = tuple((segment.path, option) for segment, option in treated)
        if key in seen:
            return None
        seen.add(key)
        found = rehearse(problem, [pair for segment, option in treated for pair in option.treat(problem, segment)])
        point = Point(
            choice=treated,
            peak_bytes=found.peak_bytes,
            step_s=found.step_s,
            peak_call=found.peak_call,
            name=name,
        )
        judged.append(point)
        if progress is not None:
            progress(len(judged), max(expected, len(judged)))
        return point

    judge("plain", ())
    plain = rehearse(problem, [])
    for number, chain in enumerate(chains):
        if number and not problem.casts and all(can_replay(problem, segment.runs[0]) for segment in chains[0]):
            break  # whatever parts of blocks can be made to do, replay of the block does
        for name, choice in candidates(chain) if candidates is not None else ():
            judge(name, choice)
        for choice in _solve(problem, chain, plain):
            judge("planned", choice)
    return Frontier(points=_without_worse(judged), candidates=tuple(judged))


def _without_worse(points: Sequence[Point]) -> tuple[Point, ...]:
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.step_s, point.peak_bytes)):
        if not found or point.peak_bytes < found[-1].peak_bytes:
            found.append(point)
    return tuple(found)


def _solve(problem: Problem, chain: Sequence[Segment], plain: Rehearsal) -> Iterable[list[tuple[Segment, Option]]]:
    """Choices along a chain for budgets from the smallest that can be reached to the plain step's peak."""
    options = weigh_chain(problem, chain, plain)
    last = chain[-1]
    start = min((run.start for run in last.runs if run.start is not None), default=problem.forward_count)
    rest = max(plain.bytes_at[last.runs[-1].stop : start], default=0)
    high, low = plain.peak_bytes, 0
    for _ in range(_NARROWINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if choose_options(options, rest, middle) is not None else (middle, high)
    for sent in (frozenset[int](), *_choose_sent(problem, chain)):
        away = {at: weigh(problem, chain[at], Option(way=Way.OFFLOAD), plain) for at in sent}
        mixed = [[away[at]] if at in away else own for at, own in enumerate(options)]
        steps = _FEWER_BUDGETS if sent else _BUDGETS
        lowest = max(0, high - sum(one.freed_bytes for one in away.values()))
        for number in range(steps + 1):
            chosen = choose_options(mixed, rest, lowest + (plain.peak_bytes - lowest) * number // steps)
            if chosen is not None:
                yield [(segment, weighed.option) for segment, weighed in zip(chain, chosen, strict=True)]


def _choose_sent(problem: Problem, chain: Sequence[Segment]) -> Iterator[frozenset[int]]:
    """Which segments to send away: as many as the link carries beside forward, evenly spread, the first ones first."""
    speed = problem.link_bytes_per_s
    if not speed:
        return
    known: set[frozenset[int]] = set()
    for limit in _BACKLOGS_BYTES:
        backlog, sent = 0.0, list[int]()
        for at, segment in enumerate(chain[:-1]):
            size = sum(problem.sizes[storage] for storage in find_sent(problem, segment.runs))
            if size and (not backlog or backlog + size <= limit):
                sent.append(at)
                backlog += size
            passed = sum(problem.seconds[segment.runs[0].first : segment.runs[-1].stop])
            backlog = max(0.0, backlog - passed * speed)
        for share in _SENT_SHARES:
            some = frozenset(sent[: max(1, round(len(sent) * share))])
            if some and some not in known:
                known.add(some)
                yield some


def weigh_chain(problem: Problem, chain: Sequence[Segment], plain: Rehearsal) -> list[list[Weighed]]:
    """The options of each segment that are worth looking at; those of one type are found once."""
    by_type: dict[int, tuple[Segment, list[Weighed]]] = {}
    for segment in chain:
        if segment.type not in by_type:
            found = [weigh(problem, segment, option, plain) for option in find_options(problem, segment)]
            by_type[segment.type] = (segment, without_worse(found))
    return [
        [move(one, problem, plain, by_type[segment.type][0], segment) for one in by_type[segment.type][1]]
        for segment in chain
    ]


def find_options(problem: Problem, segment: Segment) -> list[Option]:
    """What can be done with a segment: nothing, running it again, and keeping some of it."""
    run = segment.runs[0]
    found = [PLAIN, Option(way=Way.RERUN)]
    if can_replay(problem, run):
        found += find_keep_sets(problem, run)
    found += find_served_sets(problem, run)
    return list(dict.fromkeys(found))
