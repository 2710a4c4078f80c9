"""How a plan names the values that it keeps, and which values these names mean in another run of the same module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from recollect._plan.problem import Problem, Run

Names = dict[tuple[str, str], tuple[int | None, ...]]
"""By module and operator, which calls of it are kept, counted in the run; ``(None,)`` for all of them."""


def name_kept(problem: Problem, run: Run, kept: Collection[int]) -> Names:
    """The names of what these calls of a run give. Numbers are left out where all calls of an operator are kept."""
    asked: defaultdict[tuple[str, str], dict[int, bool]] = defaultdict(dict)
    for number, _, site in problem.sites(run):
        asked[site.module, site.op][site.call] = number in kept
    found: Names = {}
    for key, calls in asked.items():
        wanted = [call for call, is_kept in calls.items() if is_kept]
        if wanted:
            found[key] = (None,) if len(wanted) == len(calls) else tuple(wanted)
    return found


def find_named(problem: Problem, run: Run, names: Names) -> Iterator[int]:
    """The calls of a run that these names mean."""
    for number, _, site in problem.sites(run):
        wanted = names.get((site.module, site.op), ())
        if None in wanted or site.call in wanted:
            yield number
