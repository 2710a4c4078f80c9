"""What a step looks like to the planner: which calls a region would hold, what they save, and who needs it when.

A *run* is one time that a module runs in forward: calls that follow each other. What can be forgotten is decided by
run, what is decided holds for the module. Saved values are followed by storage: views share the fate of what they view.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recollect._core.calls import Category, Lifetime, OpCall, Received, Saved
from recollect._core.decisions import Site
from recollect._core.families import paths_above
from recollect._core.profiles import Profile
from recollect._core.timetables import LEAST_BYTES
from recollect._plan.backwards import Backwards
from recollect._plan.casts import find_casts, find_inner_casts
from recollect._plan.occupancy import Occupancy
from recollect._plan.overheads import USUAL, Overhead
from recollect._plan.prices import Prices
from recollect._plan.refusals import refuse_unplannable
from recollect._plan.rounds import find_forward, take_round

_NOTHING = Received(module="", call=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One time that a module runs in forward.

    Attributes:
        path: of the module.
        first: its first call.
        stop: the call after its last.
        asks: for each backward call that asks for values saved in the run, which storages; in the order of backward.
        makes: the storages that are made in it, each with the calls that make it: the first, and later writers.
        end: the backward call after the last that belongs to the run; 0 if none does.
        last_needed: the call at which running again may stop: what comes from there on saves nothing.
        needs: the storages made in the run that its backward asks for.
        idle: those that it saves and nobody asks for: no backward pass comes to it.
        read_outside: the storages that running it again reads or is given, and that are made elsewhere.
        form: what it was called with, as far as that tells one kind of call from another; see `Received`.
    """

    path: str
    first: int
    stop: int
    asks: tuple[tuple[int, tuple[int, ...]], ...]
    makes: dict[int, tuple[int, ...]]
    end: int
    last_needed: int
    needs: frozenset[int]
    idle: frozenset[int]
    read_outside: frozenset[int]
    form: str = ""

    @property
    def start(self) -> int | None:
        """The first backward call that asks for something; None if none does."""
        return self.asks[0][0] if self.asks else None


class Problem:
    """A profile, read once for all questions of the planner.

    Attributes:
        plain: the step as it was profiled.
        profile: the step as regions will find it: the same, unless they change it, see `Profile.under_regions`, or it
            runs forward and backward several times, see `rounds.py`.
        link_bytes_per_s: how fast values can be sent away and back; None if they stay.
        overheads: what regions cost the host, by their ways; whoever has measured it here sets it.
        may_join: whether a region may forget what the one before gave it; see `joins.py`.
        forward: its calls of forward; they come in several parts where backward comes between, see `rounds.py`.
        sizes: of its storages, as the device rounds them.
        spans: when each is there, see `Timeline`.
        leaves: paths of the modules that hold no others.
        saved_by: for each storage the forward calls that save it.
        count_saved: for each forward call how many storages it saves.
        read_by: for each storage the forward calls that read it.
        given_at: for each storage the forward calls before which a module was given it, where calls do not show it.
        inner_casts: the forward calls that cast or copy what a call of torch is given, as its first step; they can run
            again without the rest of it.
        casts: these, and all others that cast as autocast does; nobody keeps what they give.
        cached: the storages of parameters that autocast has cast, and keeps until it is over: to the end of forward.
        prices: what its calls cost.
        seconds: what each call adds to the step, as those that do the same do.
        plain_s: what the plain step took.
        backwards: its backward passes.
        released: for each forward call the backward call at whose start what it saved is gone.
        derived: what solvers have found for parts of it, by their own keys: it holds for all parts that are the same.

    Raises:
        ValueError: the step has no backward, or was profiled under regions.
    """

    def __init__(self, profile: Profile) -> None:
        self.plain = profile
        profile = profile.under_regions or profile
        refuse_unplannable(profile)
        profile = take_round(profile)
        self.profile = profile
        self.link_bytes_per_s: float | None = None
        self.overheads: Mapping[str, Overhead] = USUAL
        self.may_join = not any(call.is_collective for call in profile.calls)
        self.calls = profile.calls
        self.sizes, self.spans = profile.timeline.sizes, profile.timeline.spans
        self.forward_count = profile.forward_count
        self.forward = find_forward(profile)
        paths = {module.path for module in profile.modules}
        self.leaves = paths.difference(path.rpartition(".")[0] for path in paths)
        self.prices = Prices(profile)
        self.seconds = self.prices.seconds
        self.plain_s = self.plain.step_s or 0.0
        self.reads = [call.reads for call in self.calls]
        self.makes: list[tuple[int, ...]] = [()] * len(self.calls)
        for call, made in itertools.groupby(profile.made(), key=lambda one: one.call):
            self.makes[call] = tuple(one.storage for one in made)
        self.saved_by: dict[int, set[int]] = defaultdict(set)
        self._edges: dict[int, list[Saved]] = defaultdict(list)
        for edge in profile.saved:
            self.saved_by[edge.storage].add(edge.by)
            self._edges[edge.by].append(edge)
        self.count_saved = Counter(edge.by for edge in profile.saved)
        self.read_by: dict[int, list[int]] = defaultdict(list)
        for number in self.forward:
            for storage in self.reads[number]:
                self.read_by[storage].append(number)
        self.given_at: dict[int, list[int]] = defaultdict(list)
        for one in profile.received:
            for storage in one.storages:
                self.given_at[storage].append(one.call)
        self._received = {(one.module, one.call): one for one in profile.received}
        self.inner_casts = find_inner_casts(profile, self.reads, self.makes)
        self.casts = find_casts(profile) | self.inner_casts
        self.cached = frozenset(
            storage for number in self.casts if self._casts_parameter(number) for storage in self.makes[number]
        )
        self.backwards = Backwards(profile)
        self.released = self.backwards.released
        self._is_simple = not self.backwards.share_graphs and len(self.forward) == self.forward_count
        self.may_join = self.may_join and self._is_simple
        self.last_use = self._find_last_uses()
        self._runs = self._find_runs()
        self.derived: dict[object, Any] = {}
        self._around: dict[int, list[Run]] = {}
        self._same: dict[tuple[str, int, int], bool] = {}

    def with_link(self, bytes_per_s: float) -> Problem:
        """The same step, where values can be sent away; the two share what is found for parts of it.

        Not where a graph is used by several backward passes, or forward goes on after one: what comes back would stay.
        """
        other = copy.copy(self)
        other.link_bytes_per_s = bytes_per_s if self._is_simple else None
        return other

    def _casts_parameter(self, number: int) -> bool:
        storages = self.profile.storages
        return any(storages[value.storage].category is Category.PARAMETER for value in self.calls[number].inputs)

    @functools.cached_property
    def whole(self) -> Run | None:
        """All of forward as one run, whatever a step does around its model; None if it comes in parts."""
        return self._make_run("", 0, self.forward_count) if len(self.forward) == self.forward_count else None

    def runs_of(self, path: str) -> list[Run]:
        """The runs of a module, in the order of forward."""
        return self._runs.get(path, [])

    @functools.cached_property
    def occupancy(self) -> Occupancy:
        """What its storages take, step by step."""
        workspaces = [call.workspace_bytes for call in self.calls]
        return Occupancy(self.sizes, self.spans, workspaces, self.profile.fixed_bytes)

    @property
    def paths(self) -> list[str]:
        """The modules that run in forward, in the order in which they first do, outer ones first."""
        return list(self._runs)

    def is_evictable(self, storage: int, run: Run) -> bool:
        """Whether nobody but the run holds it between forward and backward."""
        of_step = self.profile.storages[storage].lifetime is not Lifetime.VALUE or self.spans[storage][1] is None
        return not of_step and all(run.first <= by < run.stop for by in self.saved_by.get(storage, ()))

    def is_lasting(self, storage: int) -> bool:
        """Whether a storage is there until the end of the step, or was before it."""
        start, end = self.spans[storage]
        return start < 0 or end is None

    @functools.cached_property
    def lasting_bytes_at(self) -> list[int]:
        """For each call, the bytes that no schedule can do without: they live through the step, or to its end."""
        changes = [0] * (len(self.calls) + 1)
        for at, (start, end) in enumerate(self.spans):
            if self.sizes[at] and self.is_lasting(at) and start < len(self.calls):
                changes[max(start, 0)] += self.sizes[at]
                changes[len(self.calls) if end is None else max(end, start, 0)] -= self.sizes[at]
        return list(itertools.accumulate(changes[:-1]))

    @functools.cached_property
    def _saving(self) -> list[int]:
        """The forward calls that save something, in order."""
        return sorted({by for savers in self.saved_by.values() for by in savers})

    def saves_between(self, first: int, stop: int) -> bool:
        """Whether one of these forward calls saves something."""
        return bisect.bisect_left(self._saving, first) < bisect.bisect_left(self._saving, stop)

    def is_sent(self, storage: int, runs: Sequence[Run]) -> bool:
        """Whether a storage leaves the device if what these runs save is sent away."""
        savers = self.saved_by[storage]
        return self.can_leave(storage) and all(any(run.first <= by < run.stop for run in runs) for by in savers)

    def can_leave(self, storage: int) -> bool:
        """Whether a storage is large enough to be sent away, and nobody holds it but those who save it."""
        one, (start, end) = self.profile.storages[storage], self.spans[storage]
        if one.lifetime is not Lifetime.VALUE or start < 0 or end is None or self.sizes[storage] < LEAST_BYTES:
            return False
        savers = self.saved_by.get(storage, ())
        let_go = max((self.released.get(by, 0) for by in savers), default=self.forward_count)
        return end <= let_go and storage in self.last_use

    def let_go(self, storage: int, run: Run) -> int:
        """The forward call before which code lets go of a value that a run makes, if nothing else holds it.

        What a module is given is held by its caller until it returns. What the code of a module has in variables is
        held until that returns: what it had then was seen, and of the rest this is assumed where it was last used.
        """
        last = self.last_use[storage]
        around = self._runs_around(last)
        maker = run.makes[storage][0]
        stop = max((one.stop for one in around if not one.first <= maker < one.stop), default=last + 1)
        innermost = around[0]
        is_inside = run.first <= innermost.first and innermost.stop <= run.stop
        seen = self.profile.storages[storage].in_variable_until or 0
        return max(stop, seen, innermost.stop if is_inside else 0)

    def _runs_around(self, number: int) -> list[Run]:
        """The runs that a forward call is part of, innermost first."""
        known = self._around.get(number)
        if known is None:
            found = []
            for path in paths_above(self.calls[number].module):
                runs = self._runs[path]
                run = runs[bisect.bisect_right(runs, number, key=lambda one: one.first) - 1]
                if run.first <= number < run.stop:  # else a part was called by somebody else
                    found.append(run)
            known = self._around[number] = found
        return known

    def count_torch_calls(self, numbers: Iterable[int]) -> int:
        """How many calls of torch make these forward calls; where nobody knows, half of the calls are views."""
        known, others = set[int](), 0
        for number in numbers:
            within = self.calls[number].within
            if within is None:
                others += 1
            else:
                known.add(within)
        return len(known) + (others + 1) // 2

    def are_same(self, one: Run, other: Run) -> bool:
        """Whether two runs of a module make the same calls, so that what is kept of one is kept of the other."""
        key = (one.path, one.first, other.first)
        if key not in self._same:
            calls, makes = self.calls, self.makes
            self._same[key] = one.stop - one.first == other.stop - other.first and all(
                (calls[here].op, calls[here].module, len(makes[here]))
                == (calls[there].op, calls[there].module, len(makes[there]))
                for here, there in zip(range(one.first, one.stop), range(other.first, other.stop), strict=True)
            )
        return self._same[key]

    def sites(self, run: Run) -> Iterator[tuple[int, int, Site]]:
        """The values that a region of this run would ask a policy about: call, storage and site, region-relative."""
        counts: Counter[str] = Counter()
        for number in range(run.first, run.stop):
            call = self.calls[number]
            nth = counts[call.op]
            counts[call.op] += 1
            for output, value in enumerate(call.outputs):
                yield number, value.storage, _site_within(call, run.path, nth, output)

    def _find_last_uses(self) -> dict[int, int]:
        """For each storage the last forward call that has to do with it."""
        last: dict[int, int] = {}
        for number in self.forward:
            call = self.calls[number]
            last.update(dict.fromkeys((*self.reads[number], *(value.storage for value in call.outputs)), number))
        return last

    def _find_runs(self) -> dict[str, list[Run]]:
        numbers: dict[str, list[int]] = {}
        for number in self.forward:
            for path in reversed(list(paths_above(self.calls[number].module))):
                numbers.setdefault(path, []).append(number)
        found: dict[str, list[Run]] = {}
        for path, mine in numbers.items():
            spans: list[list[int]] = []  # of each run, its first and its last call
            for number in mine:
                if spans and number == spans[-1][1] + 1 and not self._is_entered(path, number):
                    spans[-1][1] = number
                else:
                    spans.append([number, number])
            own = self._leave_out_parts(path, spans)
            found[path] = [self._make_run(path, first, last + 1) for first, last in own]
        return found

    def _leave_out_parts(self, path: str, spans: list[list[int]]) -> list[list[int]]:
        """The spans that are runs of a module, not of one of its parts alone that others call, as DiT's head does."""
        if len(spans) == 1 or not path:
            return spans
        parts = [
            {
                call.module.removeprefix(path).partition(".")[2].partition(".")[0]
                for call in self.calls[first : last + 1]
            }
            for first, last in spans
        ]
        return [
            span
            for span, own in zip(spans, parts, strict=True)
            if len(own) > 1 or "" in own or not any(own < other for other in parts)
        ]

    def _is_entered(self, path: str, number: int) -> bool:
        """Whether a module was called anew just before one of its calls."""
        entered = self.calls[number].entered
        return entered is not None and entered in paths_above(path)

    def _make_run(self, path: str, first: int, stop: int) -> Run:
        makes: dict[int, list[int]] = {}
        asks: dict[int, dict[int, None]] = {}
        idle = set[int]()
        last_needed, given = first, self._received.get((path, first), _NOTHING)
        for number in range(first, stop):
            for storage in self.makes[number]:
                makes[storage] = [number]
            for storage in self.calls[number].writes:
                if storage in makes and makes[storage][-1] != number:
                    makes[storage].append(number)
        for number in range(first, stop):
            for edge in self._edges.get(number, ()):
                for moment in self.backwards.asked.get(number, ()):
                    asks.setdefault(moment, {})[edge.storage] = None
                if number not in self.backwards.asked and edge.storage in makes:
                    idle.add(edge.storage)
                maker = makes.get(edge.storage)
                # What a call saves of its inputs is saved before it runs; of its results, after.
                last_needed = max(last_needed, number + 1 if maker and maker[-1] == number else number)
        needs = frozenset(storage for own in asks.values() for storage in own if storage in makes)
        return Run(
            path=path,
            first=first,
            stop=stop,
            asks=tuple((moment, tuple(asks[moment])) for moment in sorted(asks)),
            makes={storage: tuple(calls) for storage, calls in makes.items()},
            end=max((self.backwards.ends.get(number, 0) for number in range(first, stop)), default=0),
            last_needed=last_needed,
            needs=needs,
            idle=frozenset(idle - needs),
            read_outside=frozenset(given.storages)
            .union(storage for number in range(first, last_needed) for storage in self.reads[number])
            .difference(makes),
            form=given.form,
        )


def _site_within(call: OpCall, path: str, nth: int, output: int) -> Site:
    site = call.site(output)
    module = call.module.removeprefix(path).removeprefix(".") if path else call.module
    return Site(
        region=path,
        op=site.op,
        call=nth,
        output=site.output,
        module=module,
        scopes=site.scopes,
        shape=site.shape,
        dtype=site.dtype,
        bytes=site.bytes,
        flops=site.flops,
        is_random=site.is_random,
        is_routing=site.is_routing,
        is_collective=site.is_collective,
    )
