"""What to keep of one run, for a number of bytes or for a price of a byte: the least recomputation.

The model is that of Checkmate (Jain et al., MLSys 2020) with a single stage: which results are kept, which calls run
again, each of whose inputs must be kept or made again. Without the limit on bytes it is a minimum cut, unless choices
are tied in other ways, too; then the linear relaxation is nearly integral. With a limit HiGHS solves it, and branching
is short. It does not see the order in which memory comes and goes in backward: `rehearse` judges that.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from recollect._plan.groups import find_groups
from recollect._plan.problem import Problem, Run
from recollect._plan.solvers.cuts import SINK, SOURCE, Network
from recollect._plan.solvers.highs import Model
from recollect._plan.ways import can_be_kept, find_copied, find_copying, find_forced, find_weight_casts

_LONGEST_S = 1.0
_HALF, _LEAST = 0.5, 1e-6
_INFINITE = float("inf")
_MOST_CORNERS = 24
_LIMIT_ROW = 0


@dataclass(frozen=True, slots=True)
class _Value:
    """A storage that could be kept: what that costs, and whether it can be."""

    storage: int
    bytes: int
    can_be_kept: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """The choice as a minimum cut: calls that run again are nodes, and each value is kept if an edge is cut."""

    network: Network
    nodes: dict[int, int]
    kept: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Corner:
    """The best choice at some price of a byte: what it keeps, how many bytes, and the seconds of what runs again."""

    kept: frozenset[int]
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The variables of a program within another one: for each call whether it runs again, for each value if kept."""

    again: dict[int, int]
    kept: dict[int, int]


class IntegerProgram:
    """The choice for one run as an integer program: each variable is 0 or 1.

    With `needs`, for a bound and for compiled graphs: only these are asked for, and what eager code cannot do is
    allowed. What is `there` is kept in any case and counts for nothing. What is asked for `later` may be held.

    Attributes:
        plain_bytes: what the run holds for backward if nothing is forgotten.
        keepable: the storages made in the run that can be kept, each by itself.
        has_groups: whether some of its calls are kept together or not at all.
    """

    def __init__(
        self,
        problem: Problem,
        run: Run,
        *,
        needs: frozenset[int] | None = None,
        there: frozenset[int] = frozenset(),
        later: frozenset[int] = frozenset(),
    ) -> None:
        self._problem, self._run, self._is_bound = problem, run, needs is not None
        self._needs = run.needs if needs is None else needs
        forced = find_forced(problem, run) if needs is None else ()
        self._there = there.union(storage for number in forced for storage in problem.makes[number])
        self._copied = {} if self._is_bound else find_copied(problem, run)
        self._casts = frozenset[int]() if self._is_bound else find_weight_casts(problem, run)
        self._calls = self._find_calls(later)
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

    def _find_calls(self, later: frozenset[int]) -> list[int]:
        """The calls that lie on the way to something that backward asks for."""
        missing, found = [at for at in self._needs | later if at not in self._there], set[int]()
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

    def _list_uses(self) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
        """The storages that may be asked for, with the calls that make each again, and those that would read it."""
        problem, run = self._problem, self._run
        read_by: defaultdict[int, list[int]] = defaultdict(list)
        for call in self._calls:
            for storage in problem.reads[call]:
                read_by[storage].append(call)
        for storage in self._kept:
            makers = tuple(call for call in run.makes.get(storage, ()) if call in self._again)
            yield storage, makers, [call for call in read_by[storage] if call not in makers]

    def _list_needs(self) -> Iterator[tuple[dict[int, float], float]]:
        """What is asked for, by backward or by a call that runs again, is kept or made again."""
        for storage, makers, readers in self._list_uses():
            for maker in makers or (None,):
                made = {} if maker is None else {self._again[maker]: 1.0}
                if storage in self._needs:
                    yield {self._kept[storage]: 1.0, **made}, 1.0
                for reader in readers:
                    yield {self._kept[storage]: 1.0, **made, self._again[reader]: -1.0}, 0.0

    @functools.cached_property
    def _cut(self) -> _Cut | None:
        """The same as a minimum cut; None if choices are tied otherwise than that a call asks for what it reads."""
        if len(self._casts) > 1 or len(self._kept) > len(self._values):
            return None
        network, node_of = Network(), dict[int, int]()
        for group in self._find_groups() if not self._is_bound else ([call] for call in self._calls):
            node_of.update(dict.fromkeys(group, network.add()))
        for call, node in node_of.items():
            network.connect(node, SINK, seconds=self._problem.prices.again_s(call))
        kept = []
        for storage, makers, readers in self._list_uses():
            # What is asked for lies with the source, as a call does that runs again. If no maker does, it is kept.
            start = SOURCE if storage in self._needs else node_of[readers[0]] if len(readers) == 1 else network.add()
            end = SINK if not makers else node_of[makers[0]] if len(makers) == 1 else network.add()
            value = self._values[storage]
            network.connect(start, end, seconds=0.0 if value.can_be_kept else _INFINITE, bytes=value.bytes)
            if len(readers) > 1 and start != SOURCE:
                for reader in readers:
                    network.connect(node_of[reader], start, seconds=_INFINITE)
            if len(makers) > 1:
                for maker in makers:
                    network.connect(end, node_of[maker], seconds=_INFINITE)
            kept.append((storage, start, end))
        return _Cut(network, node_of, tuple(kept))

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

    def find_corners(self, most: int = _MOST_CORNERS) -> Iterator[Corner]:
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

    def _price(self, seconds_per_byte: float) -> Corner | None:
        """The best choice if bytes have a price; None if there is no answer in time."""
        price = min(seconds_per_byte, 1.0)  # a second for a byte: nothing is worth that
        values = self._solve_priced(price)
        if values is None:
            return None
        kept = self._read_kept(values)
        seconds = sum(self._problem.prices.again_s(call) for call, at in self._again.items() if values[at] > _HALF)
        return Corner(kept, self.count_bytes(kept), seconds)

    def _solve_priced(self, price: float) -> list[float] | None:
        """The cheapest choice: of a minimum cut, or of a program that is nearly one."""
        side = None if self._cut is None else self._cut.network.cut(price)
        if self._cut is None or side is None:
            prices = {self._kept[at]: value.bytes * price for at, value in self._values.items() if value.bytes}
            # The quick program mostly has whole numbers for an answer.
            found = self._model.solve(more_costs=prices, seconds=_LONGEST_S, is_whole=False)
            if found is None or any(_LEAST < value < 1 - _LEAST for value in found):
                found = self._model.solve(more_costs=prices, seconds=_LONGEST_S)
            return found
        values = [0.0] * (len(self._calls) + len(self._values))
        for call, node in self._cut.nodes.items():
            values[self._again[call]] = float(node in side)
        for storage, start, end in self._cut.kept:
            values[self._kept[storage]] = float(start in side and end not in side)
        return values

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

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of each value that could be kept."""
        return {storage: value.bytes for storage, value in self._values.items()}

    def place(self, model: Model, kept: dict[int, int] | None = None) -> Placed:
        """Add it to another program, but for its limit, for a bound; with `kept` for its values, its calls are free."""
        again = {call: model.add(0.0 if kept else self._problem.prices.again_s(call)) for call in self._calls}
        if kept is None:
            kept = {at: model.add(0.0, most=1.0 if one.can_be_kept else 0.0) for at, one in self._values.items()}
        columns = {self._again[call]: column for call, column in again.items()}
        columns.update({at: kept[storage] for storage, at in self._kept.items()})
        for row, least in self._list_needs():
            model.require({columns[at]: factor for at, factor in row.items()}, at_least=least)
        return Placed(again=again, kept=kept)
