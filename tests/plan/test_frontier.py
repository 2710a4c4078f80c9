"""The planner against brute force on small steps: it finds the best, and its time never rises with the budget."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recollect._core.profiles import Profile
from recollect._plan.frontier import find_frontier
from recollect._plan.problem import Problem, Run
from recollect._plan.rehearse import rehearse
from recollect._plan.segments import find_chains
from recollect._plan.solvers.bound import LowerBound, find_least_bytes
from recollect._plan.solvers.program import IntegerProgram
from recollect._plan.treatments import PlannedWay, Treatment
from tests.plan.blocks import make_step, stacks

pytest.importorskip("scipy")


def subsets(values: Iterator[int]) -> Iterator[tuple[int, ...]]:
    known = list(values)
    return itertools.chain.from_iterable(itertools.combinations(known, count) for count in range(len(known) + 1))


def treatments(problem: Problem, run: Run) -> list[Treatment | None]:
    """What the executor can do: leave the run alone, run it again, or replay it from what some of its calls gave."""
    calls = [number for number in range(run.first, run.stop) if problem.makes[number]]
    kept = [frozenset(at for number in some for at in problem.makes[number]) for some in subsets(iter(calls)) if some]
    return [None, Treatment(way=PlannedWay.RERUN), *(Treatment(way=PlannedWay.REPLAY, kept=some) for some in kept)]


def try_all(problem: Problem) -> list[tuple[int, float]]:
    """Peak and time of everything that regions can do with the layers."""
    runs = [run for path in problem.paths if path.startswith("layers.") for run in problem.runs_of(path)]
    found = []
    for choice in itertools.product(*(treatments(problem, run) for run in runs)):
        pairs = [(run, treatment) for run, treatment in zip(runs, choice, strict=True) if treatment is not None]
        joined = [*pairs[:1], *((run, replace(treatment, is_joined=True)) for run, treatment in pairs[1:])]
        for some in (pairs, joined) if len(pairs) > 1 else (pairs,):
            seen = rehearse(problem, some)
            found.append((seen.peak_bytes, problem.plain_s + seen.again_s))
    return found


@settings(max_examples=40, deadline=None, derandomize=True)  # one in a thousand is not the best by a little
@given(stacks(most=3))
def test_no_choice_of_regions_beats_the_plan(step: Profile) -> None:
    problem = Problem(step)
    frontier = find_frontier(problem)
    every = try_all(problem)
    for budget in {peak for peak, _ in every}:
        best = min(seconds for peak, seconds in every if peak <= budget)
        point = frontier.fastest_within(budget)
        assert point is not None
        assert point.step_s == pytest.approx(best)


@settings(max_examples=25, deadline=None)
@given(stacks(), st.lists(st.integers(0, 100), min_size=2, max_size=6))
def test_the_time_never_rises_with_the_budget(step: Profile, budgets: list[int]) -> None:
    frontier = find_frontier(Problem(step))
    times = [point.step_s for budget in sorted(budgets) if (point := frontier.fastest_within(budget)) is not None]
    assert times == sorted(times, reverse=True)
    peaks = [point.peak_bytes for point in frontier.points]
    assert peaks == sorted(peaks, reverse=True)


@settings(max_examples=25, deadline=None)
@given(stacks())
def test_nothing_takes_less_than_what_some_call_needs(step: Profile) -> None:
    problem = Problem(step)
    assert find_least_bytes(problem) <= find_frontier(problem).smallest.peak_bytes


@settings(max_examples=25, deadline=None)
@given(stacks())
def test_nothing_is_quicker_than_the_lower_bound(step: Profile) -> None:
    problem = Problem(step)
    bound = LowerBound(problem)
    for point in find_frontier(problem).points:
        least = bound.seconds(point.peak_bytes)
        assert least is not None
        assert least <= point.step_s + 1e-6


@settings(max_examples=25, deadline=None)
@given(stacks(most=3))
def test_no_choice_of_regions_is_quicker_than_the_lower_bound(step: Profile) -> None:
    problem = Problem(step)
    bound = LowerBound(problem)
    for peak, seconds in try_all(problem):
        least = bound.seconds(peak)
        assert least is not None
        assert least <= seconds + 1e-6


@settings(max_examples=40, deadline=None)
@given(stacks(layers=1))
def test_keep_sets_are_the_quickest_for_their_bytes(step: Profile) -> None:
    problem = Problem(step)
    for segment in (find_chains(problem) or [[]])[0]:
        run = segment.runs[0]
        program = IntegerProgram(problem, run)

        def cost(kept: frozenset[int], run: Run = run) -> tuple[int, float]:
            size = sum(problem.sizes[at] for at in kept if problem.is_evictable(at, run) or at not in run.needs)
            return size, rehearse(problem, [(run, Treatment(way=PlannedWay.REPLAY, kept=kept))]).again_s

        every = [cost(frozenset(kept)) for kept in subsets(iter(program.keepable))]
        for limit in {size for size, _ in every}:
            kept = program.solve(limit)
            assert kept is not None
            size, seconds = cost(kept)
            assert size <= limit
            assert seconds == pytest.approx(min(time for other, time in every if other <= limit))


def test_standard_choices_are_candidates_that_no_plan_is_worse_than() -> None:
    forward: list[dict[str, object]] = [
        {"module": f"layers.{at // 2}", "reads": [at], "makes": [at + 1], "saves": [at], "seconds": 1.0}
        for at in range(6)
    ]
    problem = Problem(make_step(forward, [4] * 7))

    def full(chain: object) -> Iterator[tuple[str, list[tuple[object, object]]]]:
        from recollect._plan.options import Option

        yield "full", [(segment, Option(way=PlannedWay.RERUN)) for segment in chain]  # type: ignore[attr-defined]

    frontier = find_frontier(problem, candidates=full)  # type: ignore[arg-type]
    (named,) = [point for point in frontier.candidates if point.name == "full"]
    best = frontier.fastest_within(named.peak_bytes)
    assert best is not None
    assert best.step_s <= named.step_s


def test_a_profile_under_regions_or_without_backward_is_refused() -> None:
    step = make_step([{"module": "a", "reads": [0], "makes": [1], "saves": [1], "seconds": 1.0}], [1, 1])
    with pytest.raises(ValueError, match="has no backward pass, so there is nothing to plan"):
        Problem(Profile(storages=step.storages, calls=step.calls[:1]))
