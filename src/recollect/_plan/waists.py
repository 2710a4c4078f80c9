"""The narrow places of forward: the few values that all later calls depend on, and nothing else of what was before."""

from __future__ import annotations

from recollect._plan.problem import Problem, Run

_WIDE = 1.5  # as a waist, next to the narrowest


def find_waists(problem: Problem, run: Run) -> list[frozenset[int]]:
    """What crosses the narrowest places of a run, in the order of forward, each once.

    What crosses a place is all that calls after it read of what calls of the run before it make.
    """
    last = {storage: numbers[-1] for storage, numbers in problem.read_by.items() if numbers}
    crossing: set[int] = set()
    widths: list[tuple[int, frozenset[int]]] = []
    for number in range(run.first, run.stop):
        crossing = {storage for storage in crossing if last.get(storage, -1) >= number}
        if crossing:
            widths.append((sum(problem.sizes[storage] for storage in crossing), frozenset(crossing)))
        crossing.update(problem.makes[number])
    middle = widths[len(widths) // 8 : -(len(widths) // 8) or None]  # where forward begins and ends all is narrow
    narrow = min((width for width, _ in middle if width), default=0) * _WIDE
    return list(dict.fromkeys(crossed for width, crossed in widths if width <= narrow))
