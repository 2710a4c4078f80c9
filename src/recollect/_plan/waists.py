"""The narrow places of forward: the few values that all later calls depend on, and nothing else of what was before."""

from __future__ import annotations

from recollect._plan.problem import Problem, Run

_WIDE = 1.5  # as a waist, next to the narrowest
_HILL = 2  # times what crosses a valley


def find_waists(problem: Problem, run: Run) -> list[frozenset[int]]:
    """What crosses the narrowest places of a run, in the order of forward, each once.

    What crosses a place is all that calls after it read of what calls of the run before it make.
    """
    widths = _measure_widths(problem, run)
    middle = widths[len(widths) // 8 : -(len(widths) // 8) or None]  # where forward begins and ends all is narrow
    narrow = min((width for width, _ in middle if width), default=0) * _WIDE
    return list(dict.fromkeys(crossed for width, crossed in widths if width <= narrow))


def find_valleys(problem: Problem, run: Run) -> list[frozenset[int]]:
    """What crosses each place of a run that is narrow beside those around it, in the order of forward.

    Between two of them twice as much crosses. So every stage of a net has its own, however wide others are.
    """
    found: list[frozenset[int]] = []
    low: tuple[int, frozenset[int]] | None = None
    high = 0
    for width, crossed in _measure_widths(problem, run):
        if low is None:
            high = max(high, width)
            low = (width, crossed) if width * _HILL <= high else None
        elif width < low[0]:
            low = (width, crossed)
        elif width >= low[0] * _HILL:
            found.append(low[1])
            low, high = None, width
    return found if low is None else [*found, low[1]]


def _measure_widths(problem: Problem, run: Run) -> list[tuple[int, frozenset[int]]]:
    """Before each call the bytes that cross the place, and what they are; places that nothing crosses are left out."""
    last = {storage: numbers[-1] for storage, numbers in problem.read_by.items() if numbers}
    crossing: set[int] = set()
    widths: list[tuple[int, frozenset[int]]] = []
    for number in range(run.first, run.stop):
        crossing = {storage for storage in crossing if last.get(storage, -1) >= number}
        if width := sum(problem.sizes[storage] for storage in crossing):
            widths.append((width, frozenset(crossing)))
        crossing.update(problem.makes[number])
    return widths
