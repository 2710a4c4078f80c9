"""What becomes of one run as a region: how its values come back, which calls are made again, what waits elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recollect._plan.groups import group_of
from recollect._plan.overheads import name_overhead
from recollect._plan.problem import Problem, Run


class PlannedWay(enum.Enum):
    """How a region is to get its values back, as a plan says it.

    RERUN: the module runs again, up to the last value that is saved. SERVE: so it does, and calls whose results were
    kept are given them. REPLAY: single calls are made again, when backward asks for what they give, starting from
    values that were kept. OFFLOAD: they come back from where they were sent.
    """

    RERUN = "rerun"
    SERVE = "serve"
    REPLAY = "replay"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What becomes of one run.

    Attributes:
        way: how its values come back.
        kept: the storages that are kept, of those made in it.
        is_away: whether what it holds until it runs again, inputs and kept results, waits elsewhere; not for replay.
        sent: for replay, the kept storages that wait elsewhere.
        is_joined: whether it forgets what the region before it gave it, which runs again for that.
    """

    way: PlannedWay
    kept: frozenset[int] = frozenset()
    is_away: bool = False
    sent: frozenset[int] = frozenset()
    is_joined: bool = False

    @property
    def sends(self) -> bool:
        """Whether something of it goes elsewhere."""
        return self.is_away or bool(self.sent) or self.way is PlannedWay.OFFLOAD

    @property
    def overhead(self) -> str:
        """The name of what it costs the host; see `overheads.py`."""
        return name_overhead(self.way.value, sends=self.sends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a region makes again for the one after it, which forgot it.

    Attributes:
        moment: the backward call before which it is asked for.
        storages: what.
    """

    moment: int
    storages: frozenset[int]


def find_recomputed(
    problem: Problem, run: Run, treatment: Treatment, given: Given | None = None
) -> list[tuple[int, list[int]]]:
    """The forward calls that run again, by the backward call that they run before; found once.

    Args:
        problem: the step.
        run: which.
        treatment: what becomes of it.
        given: what the region after it asks for in addition.
    """
    known: dict[object, list[tuple[int, list[int]]]] = problem.derived.setdefault("recomputed", {})
    key = (run.first, run.stop, treatment.way, treatment.kept, given)
    if key not in known:
        known[key] = _find_recomputed(problem, run, treatment, given)
    return known[key]


def _find_recomputed(
    problem: Problem, run: Run, treatment: Treatment, given: Given | None
) -> list[tuple[int, list[int]]]:
    if run.start is None or treatment.way is PlannedWay.OFFLOAD:
        return []
    if treatment.way is PlannedWay.REPLAY:
        return _find_replayed(problem, run, treatment.kept, given)
    pass_of = problem.backwards.pass_of
    firsts = {pass_of(moment): moment for moment, _ in reversed(run.asks)}
    if given is not None:
        nth = pass_of(given.moment)
        firsts[nth] = min(firsts.get(nth, given.moment), given.moment)
    calls = range(run.first, find_stop(run, given))
    again = [number for number in calls if not _is_served(problem, number, treatment)]
    return [(moment, again) for moment in sorted(firsts.values())]


def _find_replayed(
    problem: Problem, run: Run, kept: frozenset[int], given: Given | None
) -> list[tuple[int, list[int]]]:
    """The same for replay, which makes what is missing when it is asked for, by whole calls of torch."""
    there, nth = set[int](), -1
    groups = group_of(problem, run)
    found = []
    asks = run.asks if given is None else sorted([(given.moment, tuple(given.storages)), *run.asks])
    for moment, storages in asks:
        if problem.backwards.pass_of(moment) != nth:  # what was made for the pass before is gone
            there, nth = set(kept), problem.backwards.pass_of(moment)
        missing = [storage for storage in storages if storage in run.makes and storage not in there]
        again: set[int] = set()
        while missing:
            for maker in run.makes[missing.pop()]:
                for call in groups[maker] if maker not in again else ():
                    again.add(call)
                    missing += [at for at in problem.reads[call] if at in run.makes and at not in there]
        for call in again:
            there.update(problem.makes[call])
        if again:
            found.append((moment, sorted(again)))
    return found


def find_stop(run: Run, given: Given | None) -> int:
    """The call before which running again may stop."""
    if given is None:
        return run.last_needed
    return max(run.last_needed, *(run.makes[storage][-1] + 1 for storage in given.storages))


def _is_served(problem: Problem, number: int, treatment: Treatment) -> bool:
    """Whether a call need not run again, because all that it made is there."""
    made = problem.makes[number]
    return bool(made) and bool(treatment.kept) and treatment.kept.issuperset(made)


def find_held(problem: Problem, run: Run, treatment: Treatment) -> list[int]:
    """What a region that runs again holds until then and nobody else does: inputs, and results that it is served."""
    served = (at for at in treatment.kept if run.makes[at][0] < run.last_needed)
    return [
        storage
        for storage in (*run.read_outside, *served)
        if problem.can_leave(storage) and all(run.first <= by < run.stop for by in problem.saved_by.get(storage, ()))
    ]


def find_sent(problem: Problem, runs: Sequence[Run]) -> dict[int, int]:
    """The storages that go away if these runs are offloaded, and the backward call that first asks for each."""
    asked: dict[int, int] = {}
    for run in runs:
        for moment, storages in run.asks:
            for storage in storages:
                asked[storage] = min(asked.get(storage, moment), moment)
    return {storage: moment for storage, moment in asked.items() if problem.is_sent(storage, runs)}


def find_first_asked(problem: Problem, run: Run, treatment: Treatment) -> int:
    """The backward call at which a replay begins, in the last pass; until then it holds all that it was given."""
    there, pass_of = treatment.kept, problem.backwards.pass_of
    last = pass_of(run.asks[-1][0]) if run.asks else 0
    moments = (
        moment
        for moment, storages in run.asks
        if pass_of(moment) == last
        and any(storage not in there and not problem.is_lasting(storage) for storage in storages)
    )
    return next(moments, max(run.end, run.start or 0))


def count_host(problem: Problem, run: Run, treatment: Treatment, given: Given | None = None) -> tuple[float, float]:
    """What the host does for a region beyond its calls, in forward and in backward; see `find_recomputed`."""
    overhead = problem.overheads[treatment.overhead]
    calls, draws, passes = _count_calls(problem, run)
    sent = _count_sent(problem, run, treatment) if treatment.sends else 0
    forward_s = overhead.forward_s(calls, draws, sent)
    if run.start is None:  # it never runs again
        return forward_s, 0.0
    made, drawn = _count_made(problem, run, treatment, given)
    return forward_s, passes * overhead.backward_s(calls, made, drawn if draws else 0, sent)


def _count_calls(problem: Problem, run: Run) -> tuple[int, int, int]:
    """How many calls of torch a run makes, how many of these draw, how many passes come to it; counted once."""
    known: dict[tuple[int, int], tuple[int, int, int]] = problem.derived.setdefault("calls of torch", {})
    key = (run.first, run.stop)
    if key not in known:
        numbers = range(run.first, run.stop)
        draws = problem.count_torch_calls(_find_draws(problem, numbers))
        passes = len({problem.backwards.pass_of(moment) for moment, _ in run.asks})
        known[key] = problem.count_torch_calls(numbers), draws, passes
    return known[key]


def _count_made(problem: Problem, run: Run, treatment: Treatment, given: Given | None) -> tuple[int, int]:
    """How many calls of torch are made again, and how many of these draw; counted once."""
    known: dict[object, tuple[int, int]] = problem.derived.setdefault("calls made again", {})
    key = (run.first, run.stop, treatment.way, treatment.kept, given)
    if key not in known:
        made = [call for _, some in find_recomputed(problem, run, treatment, given) for call in some]
        drawn = problem.count_torch_calls(call for call in made if problem.calls[call].is_random)
        known[key] = problem.count_torch_calls(made), drawn
    return known[key]


def _count_sent(problem: Problem, run: Run, treatment: Treatment) -> int:
    """How many values a region sends; counted once."""
    known: dict[tuple[int, int, Treatment], int] = problem.derived.setdefault("values sent", {})
    key = (run.first, run.stop, treatment)
    if key not in known:
        if treatment.way is PlannedWay.OFFLOAD:
            known[key] = len(find_sent(problem, [run]))
        else:
            known[key] = len(find_held(problem, run, treatment) if treatment.is_away else treatment.sent)
    return known[key]


def _find_draws(problem: Problem, numbers: Iterable[int]) -> list[int]:
    """The calls that draw random numbers; attention counts only beside others, for it seldom has dropout alone."""
    found = [number for number in numbers if problem.calls[number].is_random]
    return found if any("attention" not in problem.calls[number].op for number in found) else []
