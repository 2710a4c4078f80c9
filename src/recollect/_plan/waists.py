"""The narrow places of forward: the few values that all later calls depend on, and nothing else of what was before."""

from __future__ import annotations

from recollect._plan.problem import Problem, Run

_WIDE = 1.5  # as a waist, next to the narrowest
_HILL = 2  # times what crosses a valley
_LONG = 1 / 16  # of a run: what crosses more of it is a skip


def find_waists(problem: Problem, run: Run) -> list[frozenset[int]]:
    """What crosses the narrowest places of a run, in the order of forward, each once.

    What crosses a place is all that calls after it read of what calls of the run before it make.
    """
    widths = _measure_widths(problem, run)
    middle = widths[len(widths) // 8 : -(len(widths) // 8) or None]  # where forward begins and ends all is narrow
    narrow = min((width for width, _ in middle if width), default=0) * _WIDE
    return list(dict.fromkeys(crossed for width, crossed in widths if width <= narrow))


def find_valleys(problem: Problem, run: Run, *, across_skips: bool = False) -> list[frozenset[int]]:
    """What crosses each place of a run that is narrow beside those around it, in the order of forward.

    Between two of them twice as much crosses. So every stage of a net has its own, however wide others are.

    Args:
        problem: the step.
        run: which part of it.
        across_skips: whether what crosses many places counts nowhere: the skips of a U-Net would hide its valleys.
    """
    found: list[frozenset[int]] = []
    low: tuple[int, frozenset[int]] | None = None
    high = 0
    for width, crossed in _measure_widths(problem, run, longest=_LONG if across_skips else 1.0):
        if low is None:
            high = max(high, width)
            low = (width, crossed) if width * _HILL <= high else None
        elif width < low[0]:
            low = (width, crossed)
        elif width >= low[0] * _HILL:
            found.append(low[1])
            low, high = None, width
    return found if low is None else [*found, low[1]]


def _measure_widths(problem: Problem, run: Run, *, longest: float = 1.0) -> list[tuple[int, frozenset[int]]]:
    """Before each call the bytes that cross the place, and what does; places that nothing crosses are left out.

    Args:
        problem: the step.
        run: which part of it.
        longest: what crosses more than this part of the run adds no bytes.
    """
    last = {storage: numbers[-1] for storage, numbers in problem.read_by.items() if numbers}
    most = longest * (run.stop - run.first)
    crossing: dict[int, int] = {}  # by storage: where it was made
    widths: list[tuple[int, frozenset[int]]] = []
    for number in range(run.first, run.stop):
        crossing = {storage: at for storage, at in crossing.items() if last.get(storage, -1) >= number}
        if width := sum(problem.sizes[one] for one, at in crossing.items() if last[one] - at <= most):
            widths.append((width, frozenset(crossing)))
        crossing.update(dict.fromkeys(problem.makes[number], number))
    return widths
