"""Calls of operators that one call of torch makes: replay makes all of them again or none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from recollect._plan.problem import Problem, Run

_PART_OF_ATTENTION = "_safe_softmax"  # only attention that has no kernel of its own calls it


def group_of(problem: Problem, run: Run) -> dict[int, list[int]]:
    """For each call of a run those that one call of torch makes with it, but for views; found once."""
    known: dict[tuple[str, int], dict[int, list[int]]] = problem.derived.setdefault("groups", {})
    key = (run.path, run.first)
    if key not in known:
        known[key] = {}
        for group in find_groups(problem, run):
            own = [number for number in group if problem.makes[number] or problem.calls[number].writes]
            known[key].update(dict.fromkeys(group, own))
    return known[key]


def find_returns(
    problem: Problem, replayed: Mapping[int, Run], owners: dict[int, int], steps: Sequence[int]
) -> dict[int, int]:
    """For each step that a replay adds the one before which the call of torch returns that it is a part of.

    Args:
        problem: the step.
        replayed: the runs that replay, by number.
        owners: for each step that somebody adds the number of that run, in order.
        steps: the call of each step.
    """
    found: dict[int, int] = {}
    for step, owner in reversed(owners.items()):
        if owner in replayed:
            call, after = steps[step], step + 1
            is_part = owners.get(after) == owner and call < steps[after]
            is_part = is_part and steps[after] < _find_return(problem, replayed[owner], call)
            found[step] = found[after] if is_part else after
    return found


def _find_return(problem: Problem, run: Run, number: int) -> int:
    """The call before which the call of torch returns that makes this one; found once."""
    known: dict[tuple[str, int], dict[int, int]] = problem.derived.setdefault("returns", {})
    key = (run.path, run.first)
    if key not in known:
        known[key] = {}
        for _, group in itertools.groupby(range(run.first, run.stop), key=lambda at: place_of_call(problem, at)):
            numbers = list(group)
            known[key].update(dict.fromkeys(numbers, numbers[-1] + 1))
    return known[key][number]


def find_groups(problem: Problem, run: Run) -> Iterator[list[int]]:
    """Calls that one call of torch makes: replay makes all of them again or none, casts of what it is given apart.

    Where the profile does not say which these are, it is told as far as it can be: parts of a norm, or of attention,
    that have no kernel of their own.
    """
    for place, group in itertools.groupby(range(run.first, run.stop), key=lambda at: place_of_call(problem, at)):
        numbers = list(group)
        yield from ([number] for number in numbers if number in problem.inner_casts)
        numbers = [number for number in numbers if number not in problem.inner_casts]
        if not numbers:
            continue
        if isinstance(place, int):
            yield numbers
            continue
        calls = [problem.calls[at] for at in numbers]
        is_layer = calls[0].module in problem.leaves and not any(call.flops for call in calls)
        if is_layer or any(_PART_OF_ATTENTION in call.op for call in calls):
            yield numbers
        else:
            yield from ([at] for at in numbers)


def place_of_call(problem: Problem, number: int) -> object:
    """What calls that one call of torch makes have in common."""
    call = problem.calls[number]
    return (call.module, call.source) if call.within is None else call.within
