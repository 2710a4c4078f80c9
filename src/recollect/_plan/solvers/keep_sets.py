"""What to keep of one run, for each number of bytes: the least recomputation, found by HiGHS.

The model is that of Checkmate (Jain et al., MLSys 2020) with a single stage: which results are kept, which calls run
again, each of whose inputs must be kept or made again. Without the limit on bytes it is a minimum cut, so the linear
relaxation is nearly integral and branching is short. It does not see the order in which memory comes and goes in
backward: `rehearse` judges that. Where a run has very few values, all choices are tried instead.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from recollect._plan.groups import find_groups
from recollect._plan.options import Option, place_of
from recollect._plan.problem import Problem, Run
from recollect._plan.solvers.highs import Model
from recollect._plan.treatments import PlannedWay
from recollect._plan.waists import find_waists
from recollect._plan.ways import (
    can_be_kept,
    cuts_by_choice,
    find_copied,
    find_copying,
    find_forced,
    find_held_for,
    find_weight_casts,
    line_of,
)

_SLICES = 12
_CALLS_IN_FULL = 150  # of a run of more, corners do: the others take a second each, and its parts are looked at too
_NEAR = 0.2  # of a slice
_LEAST_GAIN = 2e-4  # of the plain step
_LONGEST_S = 1.0
_HALF, _LEAST = 0.5, 1e-6
_MOST_CORNERS = 24
_FEW, _FEWER = 6, 4
_LIMIT_ROW = 0
_MOST_WAISTS = 4


@dataclass(frozen=True, slots=True)
class _Value:
    """A storage that could be kept: what that costs, and whether it can be."""

    storage: int
    bytes: int
    can_be_kept: bool


@dataclass(frozen=True, slots=True)
class _Corner:
    """The best choice at some price of a byte: what it keeps, how many bytes, and the seconds of what runs again."""

    kept: frozenset[int]
    bytes: int
    seconds: float


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


def _find_gain(corners: Sequence[_Corner], most_bytes: int) -> float:
    """How much quicker than the corners within so many bytes a choice can be at most: none lies below their hull.

    >>> corners = [_Corner(frozenset(), 0, 8.0), _Corner(frozenset(), 8, 0.0)]
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


class IntegerProgram:
    """The choice for one run as an integer program: each variable is 0 or 1.

    With `needs`, for a bound and for compiled graphs: only these are asked for, and what eager code cannot do is
    allowed. What is `there` is kept in any case and counts for nothing.

    Attributes:
        plain_bytes: what the run holds for backward if nothing is forgotten.
        keepable: the storages made in the run that can be kept, each by itself.
        has_groups: whether some of its calls are kept together or not at all.
    """

    def __init__(
        self, problem: Problem, run: Run, *, needs: frozenset[int] | None = None, there: frozenset[int] = frozenset()
    ) -> None:
        self._problem, self._run, self._is_bound = problem, run, needs is not None
        self._needs = run.needs if needs is None else needs
        forced = find_forced(problem, run) if needs is None else ()
        self._there = there.union(storage for number in forced for storage in problem.makes[number])
        self._copied = {} if self._is_bound else find_copied(problem, run)
        self._casts = frozenset[int]() if self._is_bound else find_weight_casts(problem, run)
        self._calls = self._find_calls()
        self._values = self._find_values()
        self._again = {call: at for at, call in enumerate(self._calls)}  # the numbers of variables
        self._kept = {storage: at for at, storage in enumerate(self._values, len(self._calls))}
        for storage, copies in self._copied.items():
            if storage in self._kept:
                self._kept.update(dict.fromkeys(copies, self._kept[storage]))  # what is kept of it are these
        self.plain_bytes = sum(problem.sizes[storage] for storage in self._needs if problem.is_evictable(storage, run))
        self.keepable = [
            storage
            for storage, value in self._values.items()
            if storage in run.makes and value.can_be_kept and storage not in self._casts
        ]

        self.has_groups = any(len(group) > 1 for group in self._find_groups())

    @property
    def unused(self) -> list[int]:
        """The last call that can be kept and does not lie on the way to anything that backward asks for."""
        calls = (number for number in reversed(range(self._run.first, self._run.stop)) if number not in self._again)
        return [number for number in calls if can_be_kept(self._problem, self._run, number)][:1]

    @functools.cached_property
    def _model(self) -> Model:
        return self._build()

    def _find_calls(self) -> list[int]:
        """The calls that lie on the way to something that backward asks for."""
        missing, found = [at for at in self._needs if at not in self._there], set[int]()
        while missing:
            for call in self._run.makes[missing.pop()]:
                if call not in found:
                    found.add(call)
                    read = self._problem.reads[call]
                    missing += [at for at in read if at in self._run.makes and at not in self._there]
        return sorted(found)

    def _find_values(self) -> dict[int, _Value]:
        """What these calls make, and what they read from outside that nobody else would hold."""
        problem, run = self._problem, self._run
        found = {}
        for call in self._calls:
            for storage in problem.makes[call]:
                held_anyway = not problem.is_evictable(storage, run)
                size = 0 if held_anyway and storage in self._needs else problem.sizes[storage]
                if storage in self._copied:
                    size = sum(problem.sizes[copy] for copy in self._copied[storage])
                is_free = self._is_bound or storage in self._casts
                found[storage] = _Value(storage, size, is_free or can_be_kept(problem, run, run.makes[storage][-1]))
            for storage in problem.reads[call]:
                end = problem.spans[storage][1]
                if storage not in run.makes and end is not None and end <= (run.start or 0):
                    found[storage] = _Value(storage, problem.sizes[storage], True)  # noqa: FBT003
        for storage, copies in self._copied.items():
            if storage in found:
                for copy in copies:
                    found.pop(copy, None)
        return found

    def _build(self) -> Model:
        model = Model()
        for call in self._calls:
            model.add(self._problem.prices.again_s(call))
        for value in self._values.values():
            model.add(0.0, most=1.0 if value.can_be_kept else 0.0)
        limit = model.require(
            {self._kept[storage]: float(value.bytes) for storage, value in self._values.items() if value.bytes}
        )
        assert limit == _LIMIT_ROW
        for row, least in self._list_needs():
            model.require(row, at_least=least)
        for copy in (copy for copies in self._copied.values() for copy in copies if copy in self._kept):
            # What was kept of a value are its copies: calls that would copy it again are not made again.
            for reader in find_copying(self._problem, self._run, [copy]):
                if reader in self._again:
                    model.require({self._kept[copy]: 1.0, self._again[reader]: 1.0}, at_most=1.0)
        for first, other in itertools.pairwise(self._casts):
            model.require({self._kept[first]: 1.0, self._kept[other]: -1.0}, at_least=0.0, at_most=0.0)
        for group in self._find_groups() if not self._is_bound else ():
            for first, other in itertools.pairwise(group):
                model.require({self._again[first]: 1.0, self._again[other]: -1.0}, at_least=0.0, at_most=0.0)
        return model

    def _list_needs(self) -> Iterator[tuple[dict[int, float], float]]:
        """What is asked for, by backward or by a call that runs again, is kept or made again."""
        problem, run = self._problem, self._run
        read_by: defaultdict[int, list[int]] = defaultdict(list)
        for call in self._calls:
            for storage in problem.reads[call]:
                read_by[storage].append(call)
        for storage in self._kept:
            makers = tuple(call for call in run.makes.get(storage, ()) if call in self._again)
            readers = [call for call in read_by[storage] if call not in makers]
            for maker in makers or (None,):
                made = {} if maker is None else {self._again[maker]: 1.0}
                if storage in self._needs:
                    yield {self._kept[storage]: 1.0, **made}, 1.0
                for reader in readers:
                    yield {self._kept[storage]: 1.0, **made, self._again[reader]: -1.0}, 0.0

    def _find_groups(self) -> Iterator[list[int]]:
        """Calls that run again together or not at all."""
        for group in find_groups(self._problem, self._run):
            yield [call for call in group if call in self._again]

    def solve(self, most_bytes: int) -> frozenset[int] | None:
        """The storages to keep within so many bytes; None if there is no answer in time."""
        values = self._model.solve(limits={_LIMIT_ROW: float(most_bytes)}, seconds=_LONGEST_S)
        if values is None:
            return None
        return self._read_kept(values)

    def count_calls(self) -> int:
        """How many calls there are to decide about."""
        return len(self._calls)

    def find_corners(self, most: int = _MOST_CORNERS) -> Iterator[_Corner]:
        """The choices that are best for some price of a byte. Mixed among many blocks, no others are needed."""
        ends = [self._price(0.0), self._price(float("inf"))]
        stack = [(ends[0], ends[1])]
        yield from (end for end in ends if end is not None)
        for _ in range(most):
            if not stack:
                return
            left, right = stack.pop(0)
            if left is None or right is None or left.bytes <= right.bytes or left.seconds >= right.seconds:
                continue
            slope = (right.seconds - left.seconds) / (left.bytes - right.bytes)
            middle = self._price(slope)
            if middle is None or not right.bytes < middle.bytes < left.bytes:
                continue
            line = left.seconds + (left.bytes - middle.bytes) * slope
            if middle.seconds < line * (1 - 1e-6):
                yield middle
                stack += [(left, middle), (middle, right)]

    def keep_at(self, seconds_per_byte: float) -> frozenset[int]:
        """The storages to keep if bytes have a price; all that are asked for if there is no answer in time."""
        found = self._price(seconds_per_byte)
        return self._needs if found is None else found.kept

    def _price(self, seconds_per_byte: float) -> _Corner | None:
        """The best choice if bytes have a price; None if there is no answer in time."""
        price = min(seconds_per_byte, 1.0)  # a second for a byte: nothing is worth that
        prices = {self._kept[at]: value.bytes * price for at, value in self._values.items() if value.bytes}
        # Without a limit this is a minimum cut or nearly so: the quick program has whole numbers for an answer.
        values = self._model.solve(more_costs=prices, seconds=_LONGEST_S, is_whole=False)
        if values is None or any(_LEAST < value < 1 - _LEAST for value in values):
            values = self._model.solve(more_costs=prices, seconds=_LONGEST_S)
        if values is None:
            return None
        kept = self._read_kept(values)
        seconds = sum(self._problem.prices.again_s(call) for call, at in self._again.items() if values[at] > _HALF)
        return _Corner(kept, self.count_bytes(kept), seconds)

    def count_bytes(self, kept: frozenset[int]) -> int:
        """What a choice holds."""
        return sum(self._values[storage].bytes for storage in kept)

    def _read_kept(self, values: list[float]) -> frozenset[int]:
        return frozenset(
            storage
            for storage in self._values
            if values[self._kept[storage]] > _HALF
            and storage in self._run.makes
            and not self._is_again(values, storage)
        )

    def _is_again(self, values: list[float], storage: int) -> bool:
        """Whether a storage is made again anyway: where bytes are left over, it costs nothing to keep it as well."""
        return all(values[self._again[maker]] > _HALF for maker in self._run.makes[storage])

    def least_s(self, most_bytes: int) -> float | None:
        """The seconds that any choice within so many bytes takes at least; None if there is no answer in time."""
        values = self._model.solve(limits={_LIMIT_ROW: float(most_bytes)}, seconds=30.0, is_whole=False)
        if values is None:
            return None
        return sum(self._problem.prices.again_s(call) * values[at] for call, at in self._again.items())
