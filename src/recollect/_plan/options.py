"""What can be done with a segment, in numbers: what each choice frees, what it costs, how much it needs meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from recollect._plan.endings import list_ends
from recollect._plan.groups import find_groups
from recollect._plan.names import find_named, name_kept
from recollect._plan.prices import Added
from recollect._plan.problem import Problem, Run
from recollect._plan.rehearse import Rehearsal, rehearse
from recollect._plan.segments import Segment
from recollect._plan.treatments import PlannedWay, Treatment
from recollect._plan.ways import can_be_kept, find_held_for, find_weight_casts


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat all segments of a type.

    Attributes:
        way: how values come back; None leaves the module as it is.
        kept: what is kept, by place: the call's number within the run, and which of its storages.
        is_away: whether what it holds until it runs again, inputs and kept results, waits elsewhere.
        sent: of what is kept, what a replay has elsewhere until it asks for it.
        is_joined: whether it forgets what the region before it gave it.
        parts: what becomes of the modules inside, by their paths from here, where these are the regions.
    """

    way: PlannedWay | None = None
    kept: frozenset[tuple[int, int]] = frozenset()
    is_away: bool = False
    sent: frozenset[tuple[int, int]] = frozenset()
    is_joined: bool = False
    parts: tuple[tuple[str, Option], ...] = ()

    @property
    def acts(self) -> bool:
        """Whether it changes anything."""
        return self.way is not None or bool(self.parts)

    @property
    def sends(self) -> bool:
        """Whether it sends some of what a region holds elsewhere."""
        return self.is_away or bool(self.sent)

    def treat(self, problem: Problem, segment: Segment) -> list[tuple[Run, Treatment]]:
        """What that means for the runs of a segment."""
        if self.parts:
            return [
                (run, treatment)
                for name, option in self.parts
                for run in problem.runs_of(f"{segment.path}.{name}")
                for treatment in option.treat_run(problem, run)
            ]
        return [(run, treatment) for run in segment.runs for treatment in self.treat_run(problem, run)]

    def treat_run(self, problem: Problem, run: Run) -> list[Treatment]:
        """What that means for one run of a module that is itself the region; empty if it is left alone."""
        if self.way is None:
            return []
        first = problem.runs_of(run.path)[0]
        if self.kept and run is not first and not problem.are_same(first, run):
            return [self._treat_other(problem, first, run)]
        kept, sent = (_find_storages(problem, run, places) for places in (self.kept, self.sent))
        return [Treatment(way=self.way, kept=kept, is_away=self.is_away, sent=sent, is_joined=self.is_joined)]

    def _treat_other(self, problem: Problem, first: Run, run: Run) -> Treatment:
        """What it means for a run that does something else than the first one of its module: names decide."""
        names = name_kept(problem, first, self.calls(problem, first))
        calls = {number for number in find_named(problem, run, names) if can_be_kept(problem, run, number)}
        way, kept = find_held_for(problem, run, calls)
        if way is PlannedWay.REPLAY and self.keeps_casts(problem, first):
            kept |= find_weight_casts(problem, run)
        is_away = self.is_away and way is not PlannedWay.REPLAY
        return Treatment(way=way, kept=kept, is_away=is_away, is_joined=self.is_joined)

    def calls(self, problem: Problem, run: Run) -> set[int]:
        """The calls that the executor is told to keep; where it holds casts, those that made what they are casts of.

        What it holds of parameters is told otherwise: see `keeps_casts`.
        """
        found = set[int]()
        for number, place in ((run.first + call, place) for call, place in self.kept):
            storages = problem.reads[number] if number in problem.inner_casts else (problem.makes[number][place],)
            found.update(run.makes[storage][-1] for storage in storages if storage in run.makes)
        return found

    def keeps_casts(self, problem: Problem, run: Run) -> bool:
        """Whether a replay of the first run of a module holds what autocast makes of its parameters."""
        return not find_weight_casts(problem, run).isdisjoint(self.storages(problem, run))

    def calls_sent(self, problem: Problem, run: Run) -> set[int]:
        """The calls whose results the executor is to send, if it is told to keep them: all of a call of torch."""
        sent = {run.first + call for call, _ in self.sent}
        return {number for group in find_groups(problem, run) if not sent.isdisjoint(group) for number in group}

    def storages(self, problem: Problem, run: Run) -> frozenset[int]:
        """The storages that it keeps of the first run of a module, or of one that is the same."""
        return _find_storages(problem, run, self.kept)


PLAIN = Option()


def _find_storages(problem: Problem, run: Run, places: Iterable[tuple[int, int]]) -> frozenset[int]:
    return frozenset(problem.makes[run.first + call][place] for call, place in places)


def place_of(problem: Problem, run: Run, storage: int) -> tuple[int, int]:
    """Where in a run a storage is made: the call's number from its start, and which of the call's storages."""
    call = run.makes[storage][0]
    return call - run.first, problem.makes[call].index(storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """An option for one segment, weighed as if it were the only one in the step.

    Attributes:
        option: which.
        freed_bytes: how much less is there between the segment's forward and its backward, until forward is over.
        cached_bytes: how much less there is in addition as soon as that is over: autocast held it so long.
        forward_bytes: the most while its forward runs.
        backward_bytes: the most while its backward runs, recomputation included.
        again_s: how much longer the step takes.
    """

    option: Option
    freed_bytes: int
    cached_bytes: int
    forward_bytes: int
    backward_bytes: int
    again_s: float


def weigh(problem: Problem, segment: Segment, option: Option, plain: Rehearsal) -> Weighed:
    """Weigh an option for a segment, beside all else as it is in the plain step, or in what takes its place.

    What it frees and adds is found once; what that costs is another matter at every pace.
    """
    known: dict[object, tuple[Weighed, Added]] = problem.derived.setdefault("weighed", {})
    key = (segment.path, option, problem.link_bytes_per_s, tuple(run.first for run, _ in plain.chosen))
    if key not in known:
        treated = [*plain.chosen, *option.treat(problem, segment)]
        seen = rehearse(problem, treated, is_timed=False) if option.acts else plain
        known[key] = _weigh(problem, segment, option, plain, seen), seen.added
    weighed, added = known[key]
    return replace(weighed, again_s=problem.prices.sum_up(added))


def _weigh(problem: Problem, segment: Segment, option: Option, plain: Rehearsal, seen: Rehearsal) -> Weighed:
    turn = problem.forward_count - 1
    forward_bytes, backward_bytes = 0, 0
    first, *later = _group_runs(problem, segment)
    for runs in (first, *later):
        start, end = _backward_of(problem, runs)
        forward, backward = _find_shift(problem, plain, runs, first)
        from_step = seen.places[start - 1] + 1
        forward_bytes = max(forward_bytes, forward + seen.most_bytes(runs[0].first, runs[-1].stop))
        if end > start:
            backward_bytes = max(backward_bytes, backward + seen.most_bytes(from_step, seen.places[end - 1] + 1))
    return Weighed(
        option=option,
        freed_bytes=plain.bytes_while(turn) - seen.bytes_while(turn),
        cached_bytes=_count_cached(problem, option, segment),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        again_s=seen.again_s,
    )


def _count_cached(problem: Problem, option: Option, segment: Segment) -> int:
    """The bytes that are forgotten, and held by autocast until forward is over."""
    return sum(
        problem.sizes[end.storage]
        for run, treatment in option.treat(problem, segment)
        if treatment.way is not PlannedWay.OFFLOAD
        for end in list_ends(problem, run)
        if end.storage in problem.cached and end.storage not in treatment.kept and end.moment == problem.forward_count
    )


def _group_runs(problem: Problem, segment: Segment) -> list[tuple[Run, ...]]:
    """The runs of a segment, apart where others save something between them.

    What others hold then is theirs to free: a dropout that runs before and after all blocks need not wait for it.
    """
    groups = [segment.runs[:1]]
    for before, run in itertools.pairwise(segment.runs):
        if problem.saves_between(before.stop, run.first):
            groups.append((run,))
        else:
            groups[-1] = (*groups[-1], run)
    return groups


def _backward_of(problem: Problem, runs: Sequence[Run]) -> tuple[int, int]:
    """The backward calls from the first that asks for a value of the runs to after the last that is of them.

    Of several passes it is the last that counts: in that the segments go one after the other.
    """
    moments, pass_of = [run.asks[-1][0] for run in runs if run.asks], problem.backwards.pass_of
    last = pass_of(max(moments, default=0))
    starts = [moment for run in runs for moment, _ in run.asks if pass_of(moment) == last]
    start = min(starts, default=problem.forward_count)
    return start, max([start, *(run.end for run in runs)])


def move(weighed: Weighed, problem: Problem, plain: Rehearsal, here: Segment, there: Segment) -> Weighed:
    """What was weighed for a segment, for another one of its type: all that differs is how much is there before it."""
    if here is there:
        return weighed
    forward, backward = _find_shift(problem, plain, *(_group_runs(problem, one)[0] for one in (here, there)))
    return replace(
        weighed,
        forward_bytes=weighed.forward_bytes + forward,
        backward_bytes=weighed.backward_bytes + backward,
    )


def _find_shift(problem: Problem, plain: Rehearsal, here: Sequence[Run], there: Sequence[Run]) -> tuple[int, int]:
    """How much more the plain step has before other runs than before these, in forward and in backward."""

    def before(runs: Sequence[Run]) -> tuple[int, int]:
        forward = plain.bytes_while(max(runs[0].first - 1, 0))
        start, end = _backward_of(problem, runs)
        return forward, plain.bytes_while(start - 1) if end > start else forward

    (forward, backward), (other_forward, other_backward) = before(here), before(there)
    return other_forward - forward, other_backward - backward


def without_worse(weighed: Iterable[Weighed]) -> list[Weighed]:
    """Those that no other one beats in all that counts."""
    found: list[Weighed] = []
    for one in sorted(weighed, key=lambda w: (w.again_s, -w.freed_bytes, w.backward_bytes)):
        if not any(
            other.again_s <= one.again_s
            and other.freed_bytes >= one.freed_bytes
            and other.backward_bytes <= one.backward_bytes
            and other.forward_bytes <= one.forward_bytes
            for other in found
        ):
            found.append(one)
    return found
