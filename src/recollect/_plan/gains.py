"""What recomputing each module would free, and what that costs: the choices that a report offers.

Each is judged as if it were the only one: the values that the module saves are gone after its forward, its inputs are
held, and all of it runs again just before its backward. Under a policy, what it keeps stays and does not run again.
Results that others save stay, and so does what something else holds, such as a list. Entries of a cache of keys and
values do not: where modules are recomputed, none is filled. It does not say what several choices give together (see
`simulate`), does not count on recomputation that stops early, and takes calls of one module that follow each other
immediately for one call.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from recollect._core.calls import Category, Lifetime, OpCall, Phase
from recollect._core.decisions import Decision, Site
from recollect._core.families import Families, paths_above
from recollect._core.gains import Gain
from recollect._core.held import find_cached, find_held, find_last_uses
from recollect._core.profiles import ModuleEntry, Profile

Policy = Callable[[Site], Decision | None]

_FEWEST_TO_THIN = 4  # modules: of fewer, every second is hardly a choice
_NO_FORWARD = ("ModuleList", "ModuleDict")  # containers that are never called


def find_gains(profile: Profile, *, policies: Mapping[str, Policy] | None = None) -> list[Gain]:
    """What recomputing each module would free, what gives most first: by the step's peak then, by bytes, by cost.

    Modules of the same kind ("layers.0", "layers.1", ...) are there one by one, and all together as ``"layers.*"``;
    repeated blocks are there also with every second one recomputed, and under each policy. Choices that free nothing
    are left out, and so is the model itself, unless it has no parts.

    Args:
        profile: the step.
        policies: by the words that `recollect.apply` knows them by.

    >>> from recollect._core.calls import Saved, Storage, Value
    >>> x, y, z = (Value(storage=at) for at in range(3))
    >>> up = OpCall(op="up", module="mlp", inputs=(x,), outputs=(y,), seconds=0.25)
    >>> down = OpCall(op="down", module="mlp", inputs=(y,), outputs=(z,), seconds=0.25)
    >>> loss = OpCall(op="loss", inputs=(z,), seconds=0.25)
    >>> back = OpCall(op="down_backward", phase=Phase.BACKWARD, inputs=(y,), forward=1)
    >>> storages = (Storage(bytes=10, lifetime=Lifetime.STEP), Storage(bytes=40), Storage(bytes=10))
    >>> modules = (ModuleEntry(path="", kind="Net"), ModuleEntry(path="mlp", kind="MLP"))
    >>> saved = (Saved(storage=1, by=1, reader=3),)
    >>> [gain] = find_gains(Profile(storages=storages, calls=(up, down, loss, back), saved=saved, modules=modules))
    >>> gain.path, gain.freed_bytes, gain.recompute_s
    ('mlp', 40, 0.5)
    """
    scales = _Scales(profile)
    found = [scales.weigh(*choice) for choice in _list_modules(profile.modules)]
    for path, kind, paths in _list_families(profile.modules):
        found.append(scales.weigh(path, kind, paths))
        if path.rpartition(".")[2] == "*":
            if len(paths) >= _FEWEST_TO_THIN:
                found.append(scales.weigh(path, kind, paths[::2], every=2))
            found += [
                scales.weigh(path, kind, paths, policy=(word, policy)) for word, policy in (policies or {}).items()
            ]
    gains = [gain for gain in found if gain is not None]
    return sorted(gains, key=lambda gain: (gain.peak_bytes, -gain.freed_bytes, gain.price, gain.path))


Choice = tuple[str, str, list[str]]
"""What a choice is called, the class of its modules, and their paths."""


def _list_modules(modules: Sequence[ModuleEntry]) -> Iterator[Choice]:
    for module in modules:
        if module.kind not in _NO_FORWARD and (module.path or len(modules) == 1):
            yield module.path, module.kind, [module.path]


def _list_families(modules: Sequence[ModuleEntry]) -> Iterator[Choice]:
    """Modules at the same place of repeated parts."""
    families = Families(modules)
    members: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        if module.kind not in _NO_FORWARD:
            members[families.name(module.path), module.kind].append(module.path)
    for (pattern, kind), paths in members.items():
        if len(paths) > 1:
            yield pattern, kind, paths


@dataclass(frozen=True, slots=True)
class _Run:
    """One time that a module runs in forward.

    Attributes:
        calls: those that run again.
        members: the same, as a set.
        inside: those whose gradients take what is run again: also those that a policy keeps.
        start: the first call of its backward, if there is any.
    """

    calls: tuple[int, ...]
    members: frozenset[int]
    inside: frozenset[int]
    start: int | None


@dataclass(frozen=True, slots=True)
class _Change:
    """Bytes that are more, or fewer, from one moment to before another.

    Moments count twice as fast as calls: call ``n`` runs at ``2n + 1``, and ``2n`` is just before it, where what it
    makes is not there yet, and what goes at its start is gone.
    """

    start: int
    end: int
    bytes: int


class _Scales:
    """Weighs choices of modules of one step: what they have in common is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._has_times = profile, profile.step_s is not None
        self._sizes, self._spans = profile.timeline.sizes, profile.timeline.spans
        self._makers = {made.storage: made.call for made in profile.made()}
        self._made: defaultdict[int, list[int]] = defaultdict(list)
        for storage, call in self._makers.items():
            self._made[call].append(storage)
        self._read_uses()
        self._cached = find_cached(profile)
        self._held = find_held(profile) - self._cached
        self._read_last = find_last_uses(profile) if self._cached else {}
        self._runs = self._find_runs()
        self._levels = _Levels(self._list_levels())

    def weigh(
        self, path: str, kind: str, paths: Sequence[str], *, every: int = 1, policy: tuple[str, Policy] | None = None
    ) -> Gain | None:
        """What recomputing these modules gives; None if it frees nothing."""
        runs = [run for one in paths for run in self._runs.get(one, ())]
        word = "full"
        if policy is not None:
            word, judge = policy
            runs = [self._under(judge, run, path) for run in runs]
        changes, freed = self._compare(runs)
        course = _Course(changes)
        starts = [2 * run.start if run.start is not None else 2 * len(self._profile.calls) for run in runs]
        freed_bytes = max((-course.at(moment - 1) for moment in starts), default=0)
        if freed_bytes <= 0:
            return None
        peak_bytes = course.peak_over(self._levels)
        for run, moment in zip(runs, starts, strict=True):
            if run.start is not None:
                before = self._levels.values[moment] + course.at(moment)
                peak_bytes = max(peak_bytes, before + self._replay(run, freed))
        seconds, flops = self._price(runs)
        return Gain(
            path=path,
            kind=kind,
            count=len(paths),
            every=every,
            policy=word,
            freed_bytes=freed_bytes,
            peak_bytes=peak_bytes,
            recompute_s=seconds if self._has_times else None,
            recompute_flops=flops,
        )

    def _under(self, policy: Policy, run: _Run, region: str) -> _Run:
        """A run of which the calls that a policy keeps are not run again. Calls are counted as in a region."""
        calls, counts, kept = self._profile.calls, Counter[str](), set[int]()
        for number in run.calls:
            call = calls[number]
            here = replace(call, region=region, call=counts[call.op])
            counts[call.op] += 1
            if Decision.SAVE in {policy(here.site(output)) for output in range(len(call.outputs))}:
                kept.add(number)
        # What runs again is what leads to a value that backward needs: a region skips the rest.
        wanted, again = set[int](), list[int]()
        for number in reversed(run.calls):
            wanted.update(storage for storage in self._made[number] if self._needs.get(storage, set()) & run.inside)
            made = {*self._made[number], *calls[number].writes}
            if number not in kept and made & wanted:
                again.append(number)
                wanted |= calls[number].reads
        again.reverse()
        return _Run(tuple(again), frozenset(again), run.inside, run.start)

    def _price(self, runs: Iterable[_Run]) -> tuple[float, int]:
        """What running them again takes, in seconds and operations, less what a region they are in takes already."""
        calls = self._profile.calls
        again: list[OpCall] = []
        already: list[OpCall] = []
        for run in runs:
            if run.start is not None:
                again += (calls[call] for call in run.calls)
                regions = {calls[call].region for call in run.calls}
                if len(regions) == 1 and regions != {""}:
                    already += (calls[other] for call in run.calls for other in self._recomputed[call])
        seconds = sum(call.seconds or 0.0 for call in again) - sum(call.seconds or 0.0 for call in already)
        return max(0.0, seconds), max(0, sum(call.flops for call in again) - sum(call.flops for call in already))

    def _read_uses(self) -> None:
        """Note who reads and saves each storage, and where the backward of each call starts."""
        self._last_use: dict[int, int] = {}
        self._needs: defaultdict[int, set[int | None]] = defaultdict(set)
        self._first_backward: dict[int, int] = {}
        self._recomputed: defaultdict[int, list[int]] = defaultdict(list)
        readers = {(edge.storage, edge.reader): edge.by for edge in self._profile.saved}
        for number, call in enumerate(self._profile.calls):
            if call.phase is Phase.FORWARD:
                used = (*call.reads, *(value.storage for value in call.outputs))
                self._last_use.update(dict.fromkeys(used, number))
                continue
            for storage in call.reads:
                if self._makers.get(storage, number) < number:
                    self._needs[storage].add(readers.get((storage, number), call.forward))
            if call.forward is not None:
                self._first_backward.setdefault(call.forward, number)
                if call.phase is Phase.RECOMPUTATION:
                    self._recomputed[call.forward].append(number)
        for edge in self._profile.saved:
            self._needs[edge.storage].add(edge.by)
            if edge.reader is not None:
                first = self._first_backward.get(edge.by, edge.reader)
                self._first_backward[edge.by] = min(first, edge.reader)

    def _find_runs(self) -> dict[str, list[_Run]]:
        """For each path the runs of what is below it: calls of forward that follow each other."""
        calls: defaultdict[str, list[int]] = defaultdict(list)
        for number, call in enumerate(self._profile.calls):
            if call.phase is Phase.FORWARD:
                for path in paths_above(call.module):
                    calls[path].append(number)
        found: defaultdict[str, list[_Run]] = defaultdict(list)
        for path, numbers in calls.items():
            for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
                run = [number for _, number in group]
                starts = [self._first_backward[number] for number in run if number in self._first_backward]
                again = tuple(number for number in run if self._runs_again(number))
                found[path].append(_Run(again, frozenset(again), frozenset(again), min(starts, default=None)))
        return dict(found)

    def _runs_again(self, number: int) -> bool:
        """Whether a call may run again: regions keep what it writes into buffers from being written twice."""
        call, storages = self._profile.calls[number], self._profile.storages
        only_buffers = bool(call.writes) and all(storages[at].category is Category.BUFFER for at in call.writes)
        return only_buffers or not call.runs_once

    def _list_levels(self) -> list[int]:
        """The bytes in use at each moment."""
        born = [0] * (len(self._profile.calls) + 1)
        for size, (start, end) in zip(self._sizes, self._spans, strict=True):
            if end is None or end > start:
                born[start] += size  # the last place is for what was there before
        levels = []
        for number, (call, now) in enumerate(zip(self._profile.calls, self._profile.timeline.bytes_at, strict=True)):
            levels += [now - call.workspace_bytes - born[number], now]
        return [*levels, 0]

    def _compare(self, runs: Sequence[_Run]) -> tuple[list[_Change], set[int]]:
        """What becomes less and more of where these are run again, and the storages that go."""
        made = {storage: run for run in runs for call in run.calls for storage in self._made[call]}
        until: dict[int, int] = {}  # inputs are there while their runs are run again
        for run in runs:
            moment = 0 if run.start is None else 2 * run.start + 1
            reads = {storage for call in run.calls for storage in self._profile.calls[call].reads}
            for storage in reads:
                if made.get(storage) is not run:
                    until[storage] = max(until.get(storage, 0), moment)
        changes, freed = [], set()
        for storage, maker in made.items():
            change = self._free(storage, maker, until.get(storage, 0))
            if change is not None:
                changes.append(change)
                freed.add(storage)
                if storage in self._cached:  # without the cache, what is made again goes after its last use
                    gone, end = 2 * self._read_last.get(storage, 0) + 2, self._spans[storage][1]
                    assert end is not None
                    changes.append(_Change(gone, max(gone, 2 * end), -self._sizes[storage]))
        for storage, moment in until.items():
            start, end = self._spans[storage]
            if storage not in freed and end is not None and 2 * end < moment:
                changes.append(_Change(2 * max(start, end), moment, self._sizes[storage]))
        return changes, freed

    def _free(self, storage: int, run: _Run, until: int) -> _Change | None:
        """When a storage is gone that only its own run needs in backward; None if it is not."""
        needs, end = self._needs.get(storage, set()), self._spans[storage][1]
        is_value = self._profile.storages[storage].lifetime is Lifetime.VALUE
        if end is None or not is_value or storage in self._held or not needs or not needs <= run.inside:
            return None
        first = max(2 * self._last_use[storage] + 2, until)
        last = 2 * end if run.start is None else min(2 * run.start + 1, 2 * end)
        return _Change(first, last, -self._sizes[storage]) if first < last else None

    def _replay(self, run: _Run, freed: set[int]) -> int:
        """The most bytes that running it again takes, beyond what is there before."""
        peak = now = 0
        goes: defaultdict[int, int] = defaultdict(int)
        for call in range(run.calls[0], run.calls[-1] + 1) if run.calls else ():
            now -= goes.pop(call, 0)
            for storage in self._made[call] if call in run.members else ():
                now += self._sizes[storage]
                end = self._spans[storage][1]
                if storage not in freed and end is not None:
                    goes[max(end, call + 1)] += self._sizes[storage]
            if call in run.members:
                peak = max(peak, now + self._profile.calls[call].workspace_bytes)
        return peak


class _Course:
    """The sum of changes over time."""

    def __init__(self, changes: Iterable[_Change]) -> None:
        steps: defaultdict[int, int] = defaultdict(int)
        for change in changes:
            steps[change.start] += change.bytes
            steps[change.end] -= change.bytes
        self._moments = sorted(steps)
        self._sums = list(itertools.accumulate(steps[moment] for moment in self._moments))

    def at(self, moment: int) -> int:
        """The sum at a moment."""
        before = bisect.bisect_right(self._moments, moment)
        return self._sums[before - 1] if before else 0

    def peak_over(self, levels: _Levels) -> int:
        """The most of the two together."""
        moments = [0, *self._moments, len(levels.values)]
        sums = [0, *self._sums]
        return max(
            levels.most(first, last) + more
            for first, last, more in zip(moments, moments[1:], sums, strict=False)
            if first < last
        )


class _Levels:
    """Numbers, and the largest in any range of them: found at once, from those of ranges as long as powers of 2."""

    def __init__(self, values: list[int]) -> None:
        self.values = values
        self._rows = [values]
        width = 1
        while 2 * width <= len(values):
            row = self._rows[-1]
            self._rows.append(list(map(max, row, row[width:])))
            width *= 2

    def most(self, first: int, last: int) -> int:
        """The largest from one place to before another."""
        power = (last - first).bit_length() - 1
        row = self._rows[power]
        return max(row[first], row[last - (1 << power)])
