"""What to keep of one run, for each number of bytes: options that replay, or that run again and are served.

The quickest for so many bytes are found by an integer program. Where a run has very few values, all choices are tried
instead.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from recollect._plan.groups import find_groups
from recollect._plan.options import Option, place_of
from recollect._plan.problem import Problem, Run
from recollect._plan.solvers.program import Corner, IntegerProgram
from recollect._plan.treatments import PlannedWay
from recollect._plan.waists import find_waists
from recollect._plan.ways import can_be_kept, cuts_by_choice, find_forced, find_held_for, find_weight_casts, line_of

_SLICES = 12
_CALLS_IN_FULL = 150  # of a run of more, corners do: the others take a second each, and its parts are looked at too
_NEAR = 0.2  # of a slice
_LEAST_GAIN = 2e-4  # of the plain step
_FEW, _FEWER = 6, 4
_MOST_WAISTS = 4


def find_keep_sets(problem: Problem, run: Run) -> Iterator[Option]:
    """Options for a run that replays, from keeping nothing to keeping all, each the quickest for its bytes."""
    program = IntegerProgram(problem, run)
    seen: set[frozenset[int]] = set()
    is_small = len(program.keepable) <= (_FEWER if program.has_groups else _FEW)
    groups = {number: group for group in find_groups(problem, run) for number in group}
    forced, casts = set(find_forced(problem, run)), find_weight_casts(problem, run)
    found = _try_all(program.keepable) if is_small else _try_slices(problem, program)
    for kept in (other for one in found for other in dict.fromkeys((one, one - casts, one | casts))):
        if kept in seen:
            continue
        seen.add(kept)
        # Without anything kept there would be no replay: what backward has no use for is kept at no cost.
        calls = forced.union(number for at in kept - casts for number in groups[run.makes[at][-1]])
        able = {number for number in calls or program.unused if can_be_kept(problem, run, number)}
        option = keep_calls(problem, run, able, holds_casts=not casts.isdisjoint(kept))
        if option.way is PlannedWay.REPLAY:
            yield option


def find_waist_sets(problem: Problem, run: Run) -> Iterator[Option]:
    """Options for a run that replays and keeps what crosses a narrow place: backward makes what lies before it later.

    So less is there at a time, which is what sets the smallest peaks; for their bytes others save more time.
    """
    forced = set(find_forced(problem, run))
    waists = find_waists(problem, run)
    for at in sorted({len(waists) * number // _MOST_WAISTS for number in range(_MOST_WAISTS)} if waists else ()):
        calls = forced.union(run.makes[storage][-1] for storage in waists[at])
        groups = (group for group in find_groups(problem, run) if not calls.isdisjoint(group))
        together = {number for group in groups for number in group if can_be_kept(problem, run, number)}
        for holds_casts in (False, True) if find_weight_casts(problem, run) else (False,):
            option = keep_calls(problem, run, together, holds_casts=holds_casts)
            if option.way is PlannedWay.REPLAY:
                yield option


def keep_calls(problem: Problem, run: Run, calls: Iterable[int], *, holds_casts: bool = False) -> Option:
    """What it means to keep what these calls give: how the executor will get the rest back.

    Args:
        problem: the step.
        run: which.
        calls: by number.
        holds_casts: whether what autocast makes of parameters is held as well, if it replays.
    """
    way, held = find_held_for(problem, run, set(calls))
    if holds_casts and way is PlannedWay.REPLAY:
        held |= find_weight_casts(problem, run)
    return Option(way=way, kept=frozenset(place_of(problem, run, storage) for storage in held))


def _try_all(keepable: list[int]) -> Iterator[frozenset[int]]:
    """Every choice: of so few values, the order in which memory comes and goes may decide."""
    for count in range(len(keepable) + 1):
        yield from map(frozenset, itertools.combinations(keepable, count))


def _try_slices(problem: Problem, program: IntegerProgram) -> Iterator[frozenset[int]]:
    """The corners of the lower hull of bytes and seconds, and between them the quickest for so many bytes.

    A corner is the quickest for its own bytes, and soon found: where one has nearly as many, or takes hardly longer
    than any choice can, no other is looked for.
    """
    corners = list(program.find_corners())
    yield from (corner.kept for corner in corners)
    if program.count_calls() > _CALLS_IN_FULL:
        return
    for number in range(_SLICES + 1):
        most_bytes = program.plain_bytes * number // _SLICES
        if any(0 <= most_bytes - corner.bytes <= _NEAR * program.plain_bytes / _SLICES for corner in corners):
            continue
        if _find_gain(corners, most_bytes) < _LEAST_GAIN * problem.plain_s:
            continue
        kept = program.solve(most_bytes)
        if kept is not None:
            yield kept


def _find_gain(corners: Sequence[Corner], most_bytes: int) -> float:
    """How much quicker than the corners within so many bytes a choice can be at most: none lies below their hull.

    >>> corners = [Corner(frozenset(), 0, 8.0), Corner(frozenset(), 8, 0.0)]
    >>> _find_gain(corners, 4), _find_gain(corners, 8)
    (4.0, 0.0)
    """
    below = [corner for corner in corners if corner.bytes <= most_bytes]
    above = [corner for corner in corners if corner.bytes > most_bytes]
    if not below:
        return float("inf")
    quickest = min(below, key=lambda corner: corner.seconds)
    if not above:
        return 0.0
    left, right = max(below, key=lambda corner: corner.bytes), min(above, key=lambda corner: corner.bytes)
    share = (most_bytes - left.bytes) / (right.bytes - left.bytes)
    return quickest.seconds - (left.seconds + (right.seconds - left.seconds) * share)


def find_served_sets(problem: Problem, run: Run) -> Iterator[Option]:
    """Options for a run that runs again as a whole: calls are kept in the order of seconds saved for each byte.

    Where a run cuts tensors by what it chooses, all that one line of code gives is kept or nothing: how large a part is
    differs from step to step, all parts together stay the same.
    """
    kept = set(find_forced(problem, run))
    together: defaultdict[object, list[int]] = defaultdict(list)
    is_cut = cuts_by_choice(problem, run)
    for number in range(run.first, run.last_needed):
        if number not in kept and can_be_kept(problem, run, number):
            call = problem.calls[number]
            together[line_of(call) if is_cut and call.source else number].append(number)
    prices = [
        (sum(map(problem.prices.again_s, numbers)) / size, numbers)
        for numbers in together.values()
        if (size := sum(problem.sizes[storage] for number in numbers for storage in problem.makes[number]))
    ]
    yield keep_calls(problem, run, kept)
    best = sorted(prices, reverse=True)
    step = max(1, len(best) // _SLICES)
    for place, (_, numbers) in enumerate(best, 1):
        kept.update(numbers)
        if place <= _SLICES // 2 or place % step == 0:
            yield keep_calls(problem, run, kept)
