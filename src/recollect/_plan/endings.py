"""When a value is gone that a run saves and does not keep."""

from __future__ import annotations

from dataclasses import dataclass

from recollect._plan.problem import Problem, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """When a value is gone that a run does not keep: after a call has used it, and not before a moment of the step."""

    storage: int
    used: int
    moment: int


def list_ends(problem: Problem, run: Run) -> list[End]:
    """For each value that a run saves, when it is gone if it is not kept; found once."""
    known: dict[tuple[int, int], list[End]] = problem.derived.setdefault("ends", {})
    key = (run.first, run.stop)
    if key not in known:
        known[key] = [_find_end(problem, run, storage) for storage in run.needs | run.idle]
    return known[key]


def _find_end(problem: Problem, run: Run, storage: int) -> End:
    start, end = problem.spans[storage]
    savers = problem.saved_by[storage]
    held = 0 if end is None else end  # by a graph that no backward pass comes to
    released = max(problem.released.get(by, held) for by in savers)
    if end is None or end > max(released, run.end):  # somebody else holds it, too, not just nodes of the run
        moment = len(problem.calls) if end is None else max(end, start)
        return End(storage=storage, used=start, moment=moment)
    cached = [problem.forward_count] if storage in problem.cached else []
    outside = [problem.released.get(by, held) for by in savers if not run.first <= by < run.stop]
    return End(storage=storage, used=problem.let_go(storage, run) - 1, moment=max([0, *cached, *outside]))
