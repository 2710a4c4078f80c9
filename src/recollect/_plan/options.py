"""What can be done with a segment, in numbers: what each choice frees, what it costs, how much it needs meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from recollect._plan.names import find_named, name_kept
from recollect._plan.prices import Added
from recollect._plan.problem import Problem, Run
from recollect._plan.rehearse import Rehearsal, rehearse
from recollect._plan.segments import Segment
from recollect._plan.treatments import PlannedWay, Treatment
from recollect._plan.ways import can_be_kept, find_groups, find_held_for


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
        is_away = self.is_away and way is not PlannedWay.REPLAY
        return Treatment(way=way, kept=kept, is_away=is_away, is_joined=self.is_joined)

    def calls(self, problem: Problem, run: Run) -> set[int]:
        """The calls that the executor is told to keep; where it holds casts, those that made what they are casts of."""
        found = set[int]()
        for number, place in ((run.first + call, place) for call, place in self.kept):
            storages = problem.reads[number] if number in problem.inner_casts else (problem.makes[number][place],)
            found.update(run.makes[storage][-1] for storage in storages)
        return found

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
        freed_bytes: how much less is there between the segment's forward and its backward.
        forward_bytes: the most while its forward runs.
        backward_bytes: the most while its backward runs, recomputation included.
        again_s: how much longer the step takes.
    """

    option: Option
    freed_bytes: int
    forward_bytes: int
    backward_bytes: int
    again_s: float


def weigh(problem: Problem, segment: Segment, option: Option, plain: Rehearsal) -> Weighed:
    """Weigh an option for a segment, beside all else as it is in the plain step.

    What it frees and adds is found once; what that costs is another matter at every pace.
    """
    known: dict[object, tuple[Weighed, Added]] = problem.derived.setdefault("weighed", {})
    key = (segment.path, option, problem.link_bytes_per_s)
    if key not in known:
        seen = rehearse(problem, option.treat(problem, segment), is_timed=False) if option.acts else plain
        known[key] = _weigh(problem, segment, option, plain, seen), seen.added
    weighed, added = known[key]
    return replace(weighed, again_s=problem.prices.sum_up(added))


def _weigh(problem: Problem, segment: Segment, option: Option, plain: Rehearsal, seen: Rehearsal) -> Weighed:
    start, end = backward_of(problem, segment)
    turn = problem.forward_count - 1
    from_step = seen.places[start - 1] + 1
    return Weighed(
        option=option,
        freed_bytes=plain.bytes_while(turn) - seen.bytes_while(turn),
        forward_bytes=seen.most_bytes(segment.runs[0].first, segment.runs[-1].stop),
        backward_bytes=seen.most_bytes(from_step, seen.places[end - 1] + 1) if end > start else 0,
        again_s=seen.again_s,
    )


def backward_of(problem: Problem, segment: Segment) -> tuple[int, int]:
    """The backward calls from the first that asks for a value of the segment to after the last that is of it."""
    starts = [run.start for run in segment.runs if run.start is not None]
    start = min(starts, default=problem.forward_count)
    return start, max([start, *(run.end for run in segment.runs)])


def move(weighed: Weighed, problem: Problem, plain: Rehearsal, here: Segment, there: Segment) -> Weighed:
    """What was weighed for a segment, for another one of its type: all that differs is how much is there before it."""
    if here is there:
        return weighed

    def before(segment: Segment) -> tuple[int, int]:
        start, _ = backward_of(problem, segment)
        first = segment.runs[0].first
        return plain.bytes_while(max(first - 1, 0)), plain.bytes_while(start - 1)

    forward, backward = (other - own for own, other in zip(before(here), before(there), strict=True))
    return replace(
        weighed,
        forward_bytes=weighed.forward_bytes + forward,
        backward_bytes=weighed.backward_bytes + backward,
    )


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
