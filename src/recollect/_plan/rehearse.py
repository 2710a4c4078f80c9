"""The judge of plans in eager code: which memory a step takes, call by call, when some of its runs are regions.

It starts from what was seen in the plain step, storage by storage, and changes only what regions change: what a region
forgets goes after its last use in forward, or when the last holder outside lets go; what it reads is held until it has
run again; what it makes again is there from then until the plain step let it go. It does not say what fragmentation
adds, and takes Python variables to let go of a forgotten value with its last use.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect._core.timetables import SeenValue
from recollect._plan.endings import list_ends
from recollect._plan.groups import find_returns
from recollect._plan.joins import find_begin, find_given, find_joins
from recollect._plan.journeys import find_absences
from recollect._plan.occupancy import Order
from recollect._plan.passing import find_passes
from recollect._plan.prices import Added, Pace
from recollect._plan.problem import Problem, Run
from recollect._plan.treatments import (
    PlannedWay,
    Treatment,
    count_host,
    find_held,
    find_recomputed,
    find_sent,
    find_stop,
)

if TYPE_CHECKING:
    from recollect._plan.occupancy import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a step takes under regions.

    Attributes:
        chosen: the runs that are regions, and what becomes of them.
        bytes_at: bytes in use while each step runs.
        calls: the call of each step; forward calls that run again are there twice.
        places: for each call of the profile, the number of its own step.
        added: what the regions add to the step.
        again_s: the same in seconds, at the pace that candidates are made for, if nothing else matters.
        step_s: how long the step takes: the device and the host work side by side.
        pace: which of them the other waits for.
        host_s: what the host does for regions, by step: see `Prices.queue`.
    """

    chosen: Sequence[tuple[Run, Treatment]]
    bytes_at: Numbers
    calls: list[int]
    places: list[int]
    added: Added
    again_s: float
    step_s: float
    pace: Pace
    host_s: Sequence[tuple[Sequence[int], float]]

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at a time."""
        return int(self.bytes_at.max())

    @property
    def peak_step(self) -> int:
        """The first step at which that many are."""
        return int(self.bytes_at.argmax())

    @property
    def peak_call(self) -> int:
        """The call at which that many are."""
        return self.calls[self.peak_step]

    def bytes_while(self, call: int) -> int:
        """The bytes in use while a call of the profile runs, for the first time."""
        return int(self.bytes_at[self.places[call]])

    def most_bytes(self, first: int, stop: int) -> int:
        """The most bytes in use from one step to before another; 0 if there is none."""
        return int(self.bytes_at[first:stop].max(initial=0))


def rehearse(problem: Problem, chosen: Sequence[tuple[Run, Treatment]], *, is_timed: bool = True) -> Rehearsal:
    """Judge a step in which these runs, none inside another, are regions.

    Without `is_timed` its time is that of the plain step and what is added: half the work where only memory counts.
    """
    return _Stage(problem, chosen).play(is_timed=is_timed)


class _Stage:
    """One rehearsal."""

    def __init__(self, problem: Problem, chosen: Sequence[tuple[Run, Treatment]]) -> None:
        self._problem = problem
        self._chosen = chosen
        inserted: dict[int, list[tuple[int, int]]] = {}
        self._joins = find_joins(problem, chosen)
        self._given = find_given(problem, chosen, self._joins)
        self._host_s: list[tuple[float, float]] = []
        for index, (run, treatment) in enumerate(chosen):
            given = self._given.get(index)
            for moment, calls in find_recomputed(problem, run, treatment, given):
                inserted.setdefault(moment, []).extend((call, index) for call in calls)
            self._host_s.append(count_host(problem, run, treatment, given))
        self._order = order = Order(len(problem.calls), inserted)
        self._steps, self._owners = order.calls, order.owners
        self._at, self._before = order.at, order.before
        self._passes = [self._before[start] for start in problem.backwards.starts]
        replayed = {at: run for at, (run, treatment) in enumerate(chosen) if treatment.way is PlannedWay.REPLAY}
        self._returns = find_returns(problem, replayed, self._owners, self._steps)

    def play(self, *, is_timed: bool) -> Rehearsal:
        problem, steps = self._problem, self._steps
        ends: dict[int, int] = {}  # of the first copies, where regions change them; by step
        copies: list[tuple[int, int, int]] = []  # of values that are made again: from step, to step, bytes
        for run, treatment in self._chosen:
            for one in list_ends(problem, run) if treatment.way is not PlannedWay.OFFLOAD else ():
                if one.storage not in treatment.kept:
                    ends[one.storage] = max(self._at[one.used] + 1, self._before[one.moment])
        for join in self._joins.values():
            giver, _ = self._chosen[join.giver]
            ends.update((at, self._at[problem.let_go(at, giver) - 1] + 1) for at in join.storages)
        self._follow(ends, copies)
        waits_s = self._send_away(ends, copies)
        added = Added(
            calls=[steps[step] for step in self._owners],
            forward_s=sum(forward for forward, _ in self._host_s),
            backward_s=sum(backward for _, backward in self._host_s),
            waits_s=waits_s,
        )
        again_s = problem.prices.sum_up(added)
        more = list(self._spread()) if is_timed else []
        step_s, pace = self._time(again_s, waits_s, more) if is_timed else (problem.plain_s + again_s, Pace.HOST)
        return Rehearsal(
            chosen=self._chosen,
            bytes_at=problem.occupancy.follow(self._order, ends, copies),
            calls=steps,
            places=self._at,
            added=added,
            again_s=again_s,
            step_s=step_s,
            pace=pace,
            host_s=more,
        )

    def _send_away(self, ends: dict[int, int], copies: list[tuple[int, int, int]]) -> float:
        """What goes elsewhere and comes back; gives how long the step waits for that."""
        problem, speed = self._problem, self._problem.link_bytes_per_s
        trips = [*self._send_modules(ends), *self._send_regions(ends), *self._send_kept(ends)] if speed else []
        if not trips or not speed:
            return 0.0
        clock = list(itertools.accumulate((problem.seconds[call] for call in self._steps), initial=0.0))
        journeys = [
            SeenValue(bytes=problem.sizes[trip.storage], made_s=clock[trip.made], used_s=clock[trip.asked])
            for trip in trips
        ]
        passes = find_passes(problem, [(run, treatment.sends) for run, treatment in self._chosen])
        passes_s = sorted(clock[self._at[call] + 1] for call in passes)
        absences, waits_s = find_absences(journeys, speed, passes_s=passes_s)
        for trip, absence in zip(trips, absences, strict=True):
            gone = max(bisect.bisect_left(clock, absence.gone_s), trip.free)
            back = bisect.bisect_right(clock, absence.back_s) - 1
            if gone < back < trip.stop:
                ends[trip.storage] = gone
                copies.append((back, trip.stop, problem.sizes[trip.storage]))
        return waits_s

    def _send_modules(self, ends: dict[int, int]) -> Iterator[_Trip]:
        """What goes of modules that send all that they save."""
        problem = self._problem
        runs = [run for run, treatment in self._chosen if treatment.way is PlannedWay.OFFLOAD]
        for storage, asked in find_sent(problem, runs).items():
            end = problem.spans[storage][1]
            assert end is not None
            yield _Trip(
                storage=storage,
                made=self._at[max(problem.saved_by[storage])] + 1,
                free=max(self._at[problem.last_use[storage]] + 1, ends.get(storage, 0)),
                asked=self._before[asked],
                stop=self._before[end],
            )

    def _send_regions(self, ends: dict[int, int]) -> Iterator[_Trip]:
        """What goes of regions that send what they hold: inputs at their start, kept results at their end."""
        problem = self._problem
        first = {index: step for step, index in sorted(self._owners.items(), reverse=True)}
        holders = Counter(
            storage
            for run, treatment in self._chosen
            if treatment.way is not PlannedWay.OFFLOAD
            for storage in run.read_outside
        )
        for index, asked in first.items():
            run, treatment = self._chosen[index]
            for storage in find_held(problem, run, treatment) if treatment.is_away else ():
                if holders[storage] > 1:
                    continue
                end = problem.spans[storage][1] or 0
                yield _Trip(
                    storage=storage,
                    made=self._at[run.stop - 1] + 1 if storage in run.makes else self._at[run.first],
                    free=self._at[problem.last_use[storage]] + 1,
                    asked=asked,
                    stop=ends.get(storage, self._before[end]),
                )

    def _send_kept(self, ends: dict[int, int]) -> Iterator[_Trip]:
        """What goes of regions that replay: some of what they keep, at their end."""
        problem = self._problem
        asked: dict[tuple[int, int], int] = {}
        for step, index in self._owners.items():
            for storage in self._chosen[index][1].sent.intersection(problem.reads[self._steps[step]]):
                asked.setdefault((index, storage), step)
        for index, (run, treatment) in enumerate(self._chosen):
            for moment, storages in run.asks if treatment.sent else ():
                for storage in treatment.sent.intersection(storages):
                    step = self._before[moment]
                    asked[index, storage] = min(step, asked.get((index, storage), step))
        for (index, storage), first in asked.items():
            run, end = self._chosen[index][0], problem.spans[storage][1] or 0
            made = self._at[run.stop - 1] + 1
            yield _Trip(storage=storage, made=made, free=made, asked=first, stop=ends.get(storage, self._before[end]))

    def _time(self, again_s: float, waits_s: float, more: Sequence[tuple[Sequence[int], float]]) -> tuple[float, Pace]:
        """How long the step takes, and what sets its pace."""
        problem, prices = self._problem, self._problem.prices
        if prices.plain is None:
            return problem.plain_s + again_s, Pace.HOST
        if not self._chosen:
            return problem.plain_s, prices.read_pace(self._at, prices.plain)
        found = prices.queue(self._steps, more)
        more_s = max(0.0, found.wall_s - prices.plain.wall_s) + waits_s
        return problem.plain_s + more_s, prices.read_pace(self._at, found)

    def _spread(self) -> Iterator[tuple[Sequence[int], float]]:
        """Steps at which the host does something for regions, and how much: evenly, for it does it call by call."""
        again: dict[int, list[int]] = {}
        for (index, _), steps in self._own_steps.items():
            again.setdefault(index, []).extend(steps)
        for index, (run, _) in enumerate(self._chosen):
            forward_s, backward_s = self._host_s[index]
            own = range(self._at[run.first], self._at[run.stop - 1] + 1)
            yield own, forward_s / len(own)
            if later := again.get(index) or [self._at[moment] for moment, _ in run.asks]:
                yield later, backward_s / len(later)

    def _follow(self, ends: dict[int, int], copies: list[tuple[int, int, int]]) -> None:
        """Run again: what that makes, and until when it holds what it reads."""
        own, problem = self._own_steps, self._problem
        made = {key: self._run_again(steps, key[0], ends, copies) for key, steps in own.items()}
        last = {index: (nth, steps[-1]) for (index, nth), steps in own.items()}
        self._hold_inputs(ends, own)
        taken = self._find_taken({index: step for index, (_, step) in last.items()})
        for (index, nth), storages in made.items():
            run, treatment = self._chosen[index]
            is_replayed, is_last = treatment.way is PlannedWay.REPLAY, nth == last[index][0]
            after = own[index, nth][-1] + 1
            for storage, (first, used) in storages.items():
                end = problem.spans[storage][1]
                stop = max(used + 1, taken.get(storage, 0))
                is_saved = storage in run.needs or storage in run.idle
                if is_saved and not is_last:  # it is made once more
                    released = (problem.backwards.released_in(by, nth) for by in problem.saved_by[storage])
                    stop = max([stop, *(self._before[moment] for moment in released)])
                elif is_saved and end is not None:
                    stop = max(stop, self._before[end])
                elif is_replayed and not is_saved:
                    stop = max(stop, self._find_dropped(storage, first))
                elif not is_replayed:  # code holds it as in forward, and at its end all that is left
                    held = after - first
                    stop = max(stop, first + (held if end is None else min(held, end - run.makes[storage][0])))
                copies.append((first, stop, problem.sizes[storage]))

    def _hold_inputs(self, ends: dict[int, int], own: dict[tuple[int, int], list[int]]) -> None:
        """Hold what regions were given, and what they are served, as long as they do."""
        problem = self._problem
        for index, (run, treatment) in enumerate(self._chosen):
            if treatment.way is PlannedWay.REPLAY:
                begin = self._before[find_begin(problem, run, treatment, self._given.get(index))]
                for storage in run.read_outside - self._forgotten(index):
                    self._hold(ends, storage, begin)
            elif run.start is None:  # nothing is made again: its inputs are held as long as the graph is
                until = max((problem.spans[storage][1] or 0 for storage in run.idle), default=0)
                for storage in run.read_outside if until else ():
                    self._hold(ends, storage, self._before[until])
        for (index, _), steps in own.items():
            run, treatment = self._chosen[index]
            if treatment.way is not PlannedWay.REPLAY:
                for storage in run.read_outside - self._forgotten(index):
                    self._hold(ends, storage, steps[-1] + 1)
                stop = find_stop(run, self._given.get(index))
                for storage in (at for at in treatment.kept if run.makes[at][0] < stop):
                    self._hold(ends, storage, self._find_served(steps, storage))

    @functools.cached_property
    def _own_steps(self) -> dict[tuple[int, int], list[int]]:
        """The steps that each chosen run adds in each backward pass, in order."""
        found: dict[tuple[int, int], list[int]] = {}
        for step, index in self._owners.items():
            found.setdefault((index, self._pass_of(step)), []).append(step)
        return found

    def _pass_of(self, step: int) -> int:
        """The backward pass in which a step runs."""
        return max(0, bisect.bisect_right(self._passes, step) - 1) if len(self._passes) > 1 else 0

    def _find_dropped(self, storage: int, first: int) -> int:
        """The step before which a call of torch that is made again lets go of what it makes inside: as in forward."""
        end = self._problem.spans[storage][1]
        last = self._returns[first]
        if end is None:
            return last
        steps = range(first + 1, last)
        return next((step for step in steps if self._steps[step] >= end), last)

    def _find_served(self, steps: Sequence[int], storage: int) -> int:
        """The step before which code that runs again lets go of a result that it is served: where it did in forward."""
        end = self._problem.spans[storage][1]
        place = len(steps) if end is None else bisect.bisect_left(steps, end, key=self._steps.__getitem__)
        return steps[place] if place < len(steps) else steps[-1] + 1

    def _run_again(
        self, steps: Sequence[int], index: int, ends: dict[int, int], copies: list[tuple[int, int, int]]
    ) -> dict[int, list[int]]:
        """What a run makes again in one pass, by storage: the step that makes it, the last that uses it there."""
        made: dict[int, list[int]] = {}
        reads, makes, sizes, returns = self._problem.reads, self._problem.makes, self._problem.sizes, self._returns
        kept, forgotten = self._chosen[index][1].kept, self._forgotten(index)
        for step in steps:
            call = self._steps[step]
            done = returns.get(step, step + 1)  # until a call of torch returns, its caller holds what it is given
            for storage in reads[call]:
                copy = made.get(storage)
                if copy is not None:
                    copy[1] = max(copy[1], step if returns.get(copy[0]) == done else done - 1)
                elif storage not in forgotten:
                    self._hold(ends, storage, done)
            for storage in makes[call]:
                if storage not in kept:
                    made[storage] = [step, step]
                elif sizes[storage]:
                    copies.append((step, step + 1, sizes[storage]))  # a second one, dropped at once
        return made

    def _forgotten(self, index: int) -> frozenset[int]:
        """What a chosen run forgets of what it was given."""
        join = self._joins.get(index)
        return frozenset() if join is None else join.storages

    def _find_taken(self, last: dict[int, int]) -> dict[int, int]:
        """For what is given again, the step before which the one that takes it is done with it."""
        problem = self._problem
        found: dict[int, int] = {}
        if not self._joins:
            return found
        for step, index in self._owners.items():
            for storage in self._forgotten(index).intersection(problem.reads[self._steps[step]]):
                found[storage] = step + 1
        for index, join in self._joins.items():
            run, treatment = self._chosen[index]
            done = last.get(index, -1) + 1 if treatment.way is not PlannedWay.REPLAY else 0
            for storage in join.storages:
                savers = (by for by in problem.saved_by.get(storage, ()) if run.first <= by < run.stop)
                used = (self._before[problem.released[by]] for by in savers if by in problem.released)
                found[storage] = max([found.get(storage, 0), done, *used])
        return found

    def _hold(self, ends: dict[int, int], storage: int, step: int) -> None:
        """Hold the first copy of a storage at least until a step."""
        start, end = self._problem.spans[storage]
        if end is None and storage not in ends:
            return
        known = ends.get(storage)
        ends[storage] = max(step, self._before[max(end or 0, start)] if known is None else known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trip:
    """A storage that is sent away, by steps: when it can go, from when nobody needs it here, when it must be back."""

    storage: int
    made: int
    free: int
    asked: int
    stop: int
