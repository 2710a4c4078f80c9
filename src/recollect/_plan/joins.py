"""Regions that forget even what they were given: the region before them runs again earlier, and gives it once more.

Two neighbours then take as much in backward as one region of both would, and hold one input. That costs little time:
what the first one makes after its last saved value. It pays where backward has room again when it comes to them, as
after a loss head that takes much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from recollect._core.calls import Lifetime
from recollect._plan.problem import Problem, Run
from recollect._plan.treatments import Given, PlannedWay, Treatment, find_first_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """What a region forgets of what it was given, and who makes it.

    Attributes:
        taker: which of the chosen runs forgets.
        giver: which of them makes it again.
        storages: what is forgotten.
    """

    taker: int
    giver: int
    storages: frozenset[int]


def find_joinable(problem: Problem, giver: Run, taker: Run) -> frozenset[int]:
    """What one run gives the next, and nobody else uses or holds."""
    known: dict[tuple[int, int, int], frozenset[int]] = problem.derived.setdefault("joinable", {})
    key = (giver.first, giver.stop, taker.first)
    if key not in known:
        known[key] = frozenset(at for at in taker.read_outside if _is_joinable(problem, giver, taker, at))
    return known[key]


def _is_joinable(problem: Problem, giver: Run, taker: Run, storage: int) -> bool:
    end = problem.spans[storage][1]
    is_value = problem.profile.storages[storage].lifetime is Lifetime.VALUE
    if not is_value or end is None or storage not in giver.makes or taker.first < giver.stop:
        return False
    savers = problem.saved_by.get(storage, ())
    if end > max((problem.released.get(by, 0) for by in savers), default=0):
        return False  # somebody else holds it
    between = range(giver.stop, taker.first)  # a view made there is another tensor than the one that was given
    views = (at for at in between if any(value.storage == storage for value in problem.calls[at].outputs))
    users = (*savers, *problem.read_by[storage], *problem.given_at.get(storage, ()), *views)
    return all(giver.first <= at < giver.stop or taker.first <= at < taker.stop for at in users)


def find_joins(problem: Problem, chosen: Sequence[tuple[Run, Treatment]]) -> dict[int, Join]:
    """The joins that hold among chosen runs, by who takes, in the order of forward; each is to the run just before."""
    if not any(treatment.is_joined for _, treatment in chosen):
        return {}
    found = {}
    order = sorted(range(len(chosen)), key=lambda index: chosen[index][0].first)
    for giver, taker in itertools.pairwise(order):
        (before, source), (run, treatment) = chosen[giver], chosen[taker]
        if treatment.is_joined and run.start is not None and source.way is not PlannedWay.OFFLOAD:
            storages = find_joinable(problem, before, run) - source.kept
            if storages:
                found[taker] = Join(taker=taker, giver=giver, storages=storages)
    return found


def find_given(problem: Problem, chosen: Sequence[tuple[Run, Treatment]], joins: dict[int, Join]) -> dict[int, Given]:
    """For each run that gives something again, what, and when: when the run that takes it first needs it."""
    found: dict[int, Given] = {}
    for join in reversed(joins.values()):
        run, treatment = chosen[join.taker]
        moment = find_begin(problem, run, treatment, found.get(join.taker))
        found[join.giver] = Given(moment=moment, storages=join.storages)
    return found


def find_begin(problem: Problem, run: Run, treatment: Treatment, given: Given | None) -> int:
    """The backward call at which a region first needs what it was given."""
    own = find_first_asked(problem, run, treatment) if treatment.way is PlannedWay.REPLAY else run.start
    assert own is not None
    return own if given is None else min(own, given.moment)
