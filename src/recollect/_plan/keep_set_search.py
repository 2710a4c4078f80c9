"""The search for what a graph keeps within a budget: choices are found by a price for bytes, and judged by simulation.

With a price for bytes the choice is a minimum cut, which HiGHS solves for graphs of thousands of nodes. A cut does not
see when memory comes and goes: kept or not, recomputation that runs through several blocks at once needs all of their
values. So cuts are tried with and without the values forced to be kept that cross the *valleys* of forward
(`waists.py`), and `simulate` judges them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from recollect._core.calls import Lifetime, OpCall
from recollect._core.profiles import Profile
from recollect._plan.fusing import is_reducing
from recollect._plan.problem import Problem, Run
from recollect._plan.simulate import Simulation, Simulator
from recollect._plan.solvers.program import IntegerProgram
from recollect._plan.waists import find_valleys

_BISECTIONS = 10
_APART, _PRICES = 0.1, 11  # how far apart prices are that are tried in any case, and how many
_TRIES, _FEW_TRIES = 48, 12  # to keep more, of the best and of any
_STRIDES = (1, 2, 4)  # through the valleys: of a transformer's every second one lies between two blocks
_OF_MANY = 32  # times as large is what statistics are made of, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSet:
    """What a graph may keep, judged.

    Attributes:
        kept: the storages.
        peak_bytes: the most bytes in use at a time, the graph's inputs included, as far as can be told before it is
            compiled.
        recomputed_s: what making the rest again costs, as far as can be told.
        simulation: all of it.
        sent: of the kept storages those that go to the host.
    """

    kept: frozenset[int]
    peak_bytes: int
    recomputed_s: float
    simulation: Simulation
    sent: frozenset[int] = frozenset()


def find_within(judge: Judge, run: Run) -> KeepSet:
    """The quickest choice found that fits the judge's budget; without one, that with the smallest peak."""
    _try_all(judge, run)
    return judge.describe(_keep_more(judge, run, judge.best))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A keep set and what it takes, without the simulation, which is large: hundreds are judged."""

    kept: frozenset[int]
    peak_bytes: int
    recomputed_s: float


class Judge:
    """Finds and judges keep sets of a step, each once, and remembers the best for a budget, which may change.

    An operator's results are kept together or not at all, as the graph will have it: what is judged is made so first.

    Attributes:
        problem: the step.
        budget_bytes: that the peak is to stay within; None asks for the smallest peak.
        always: the storages that are kept in any case.
    """

    def __init__(self, priced: Profile, budget_bytes: int | None) -> None:
        self.problem, self.budget_bytes = Problem(priced), budget_bytes
        self._simulator = Simulator(priced)
        self._known: dict[frozenset[int], _Found] = {}
        self._judged: dict[frozenset[int], _Found] = {}
        self._programs: dict[frozenset[int], IntegerProgram] = {}
        self._solved: dict[tuple[frozenset[int], float], frozenset[int]] = {}
        makes = self.problem.makes[: priced.forward_count]
        self.always = _find_always(priced)
        self._several = {number: frozenset(made) for number, made in enumerate(makes) if len(made) > 1}

    def solve(self, run: Run, there: frozenset[int], price_of_byte: float) -> frozenset[int]:
        """What is best kept at a price for a byte, beside what is kept in any case."""
        key = there, price_of_byte
        if key not in self._solved:
            if there not in self._programs:
                self._programs[there] = IntegerProgram(self.problem, run, needs=run.needs, there=there)
            self._solved[key] = self._programs[there].keep_at(price_of_byte) | there
        return self._solved[key]

    def begin(self, budget_bytes: int | None) -> None:
        """Search anew: what was judged before is forgotten, so that a budget has the same answer whoever asks."""
        self.budget_bytes = budget_bytes
        self._judged.clear()

    @property
    def best(self) -> _Found:
        """Of all that were judged, the quickest that fits; if none does, the one with the smallest peak."""
        return min(self._judged.values(), key=self._rank)

    def __call__(self, kept: frozenset[int]) -> _Found:
        found = self._judged[kept] = self._find(kept)
        return found

    def _find(self, kept: frozenset[int]) -> _Found:
        found = self._known.get(kept)
        if found is None:
            whole = self._simulate(kept)
            possible = self._make_whole(whole)
            if possible != kept:
                found = self._find(possible)
            else:
                found = _Found(kept=kept, peak_bytes=whole.peak_bytes, recomputed_s=whole.recomputed_s)
            self._known[kept] = found
        return found

    def _make_whole(self, found: KeepSet) -> frozenset[int]:
        """The keep set with all results or none of each operator.

        None, if it runs again whatever is kept of it and that is the smaller part: of attention the seeds, some bytes.
        """
        again, sizes = frozenset(found.simulation.recomputed_calls), self.problem.sizes
        kept = found.kept
        for number, made in self._several.items():
            there = kept & made
            if there and there != made:
                is_less = 2 * sum(sizes[storage] for storage in there) < sum(sizes[storage] for storage in made)
                kept = kept - made if is_less and number in again and not there & self.always else kept | made
        return kept

    def describe(self, found: _Found) -> KeepSet:
        """All that is known of it."""
        return self._simulate(found.kept)

    def _simulate(self, kept: frozenset[int]) -> KeepSet:
        found = self._simulator.run(kept)
        again_s = sum(self.problem.seconds[step.call] for step in found.steps if step.again)
        return KeepSet(kept=kept, peak_bytes=max(found.bytes_at), recomputed_s=again_s, simulation=found)

    def fits(self, found: _Found) -> bool:
        """Whether it stays within the budget."""
        return self.budget_bytes is not None and found.peak_bytes <= self.budget_bytes

    def _rank(self, found: _Found) -> tuple[float, float]:
        """Less is better: first what fits, by time; then what does not, by peak."""
        return (0.0 if self.fits(found) else float(found.peak_bytes)), found.recomputed_s


def _try_all(judge: Judge, run: Run) -> None:
    """Judge what standard policies keep, and what is best at some price for a byte."""
    problem = judge.problem
    always = judge.always
    plain = judge(run.needs | always)
    for kept in dict.fromkeys(_list_standard(problem, run, always)):
        judge(kept)
    for there in dict.fromkeys((always, *(always | crossing for crossing in _list_crossings(problem, run)))):
        low, high = 0.0, _find_highest(problem)
        small, large = judge(judge.solve(run, there, high)), plain
        for price_of_byte in _list_prices(high) if there == always else ():
            found = judge(judge.solve(run, there, price_of_byte))
            if judge.fits(found):
                low, high, small = price_of_byte * _APART, price_of_byte, found
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5 if low else high / 2**_BISECTIONS
            found = judge(judge.solve(run, there, middle))
            if judge.fits(found):
                high, small = middle, found
            else:
                low, large = middle, found
        if judge.fits(small) and large.recomputed_s < judge.best.recomputed_s:
            _mix(judge, run, small, large)


def _list_standard(problem: Problem, run: Run, always: frozenset[int]) -> Iterator[frozenset[int]]:
    """What standard policies keep: what crosses valleys, and of products all, every second or none, and attention."""
    calls = problem.profile.calls
    numbers = [number for number in range(run.first, run.stop) if calls[number].flops]
    attention = [number for number in range(run.first, run.stop) if "attention" in calls[number].op]
    products = [number for number in numbers if number not in set(attention)]
    chosen = [attention + products[::2], attention + products[1::2], attention + products, attention]
    for crossing in _list_crossings(problem, run):
        for one in ([], *chosen):
            made = {storage for number in one for storage in problem.makes[number]}
            yield always | crossing | (made & run.makes.keys())


def _list_crossings(problem: Problem, run: Run) -> Iterator[frozenset[int]]:
    """What crosses the valleys of forward: all of them, every second, every fourth, each from every place to begin.

    The places differ: between two blocks of a transformer little is made again, in the middle of one a product more.
    """
    for across_skips in (False, True):
        valleys = find_valleys(problem, run, across_skips=across_skips)
        for stride in _STRIDES:
            for start in range(min(stride, len(valleys))):
                yield frozenset[int]().union(*valleys[start::stride])


def _mix(judge: Judge, run: Run, small: _Found, large: _Found) -> None:
    """Between two keep sets: identical blocks change their minds at the same price, the last ones are to do so first.

    What the last blocks keep is gone first in backward.
    """
    assert judge.budget_bytes is not None
    more = _by_maker(run, large.kept - small.kept)
    _fill(judge, small, list(more.values())[::-1], judge.budget_bytes, tries=_FEW_TRIES)


def _keep_more(judge: Judge, run: Run, found: _Found) -> _Found:
    """Keep also what is still made again, where there is room for it.

    At one price for a byte a value goes, however short its life: logits, which are there again before the peak. So
    what products, convolutions and attention give is tried first, the last ones before others; then all that is
    written, by the time that a byte of it saves.
    """
    limit = max(found.peak_bytes, judge.budget_bytes or 0)
    problem = judge.problem

    def list_dropped() -> dict[int, frozenset[int]]:
        again = set(judge.describe(found).simulation.recomputed_calls)
        dropped = _by_maker(run, run.makes.keys() - found.kept)
        return {call: made for call, made in dropped.items() if call in again and size(made)}

    def size(made: frozenset[int]) -> int:
        return sum(problem.sizes[storage] for storage in made)

    dropped = sorted(list_dropped().items(), key=lambda one: -problem.seconds[one[0]])
    found = _fill(judge, found, [made for _, made in dropped], found.peak_bytes, tries=_FEW_TRIES)  # what costs nothing
    products = [(call, made) for call, made in list_dropped().items() if problem.profile.calls[call].flops]
    products.sort(key=lambda one: -one[0])
    found = _fill(judge, found, [made for _, made in products], limit)
    others = sorted(list_dropped().items(), key=lambda one: -problem.seconds[one[0]] / size(one[1]))
    return _fill(judge, found, [made for _, made in others], limit)


def _by_maker(run: Run, storages: Collection[int]) -> dict[int, frozenset[int]]:
    """Storages by the call that makes them, in the order of forward: an operator's results are kept together."""
    found: dict[int, set[int]] = {}
    for storage in storages:
        found.setdefault(run.makes[storage][0], set()).add(storage)
    return {call: frozenset(found[call]) for call in sorted(found)}


def _fill(judge: Judge, found: _Found, more: list[frozenset[int]], limit_bytes: int, *, tries: int = _TRIES) -> _Found:
    """Keep of these results of calls, in this order, what leaves the peak within a limit and saves time.

    All at once if that fits; if not, first one half, then the other: what does not fit is passed over.
    """
    parts = [more] if more else []
    while parts and tries:
        part, tries = parts.pop(0), tries - 1
        larger = judge(found.kept.union(*part))
        if larger.peak_bytes <= limit_bytes:
            found = larger if larger.recomputed_s < found.recomputed_s else found
        elif len(part) > 1:
            parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return found


def _find_always(profile: Profile) -> frozenset[int]:
    """What is kept in any case: results of the step, of calls that must not run twice, and statistics.

    Those are the few numbers that a norm or a softmax makes of many. Made again in backward they would be one kernel
    with what reads them there, which then reads its input more than once and cannot write into it: a second copy of the
    logits, for the sake of two numbers for each token.
    """
    made: dict[int, set[int]] = {}
    for one in profile.made():
        if one.call < profile.forward_count:
            made.setdefault(one.call, set()).add(one.storage)
    return frozenset(
        storage
        for number, storages in made.items()
        if profile.calls[number].runs_once
        or any(profile.storages[storage].lifetime is Lifetime.RETURNED for storage in storages)
        or _is_statistic(profile.calls[number])
        for storage in storages
    )


def _is_statistic(call: OpCall) -> bool:
    most = max((value.bytes for value in call.inputs), default=0)
    return is_reducing(call) and sum(value.bytes for value in call.outputs) * _OF_MANY <= most


def _list_prices(highest: float) -> Iterator[float]:
    """Prices from the highest down to one at which all is kept.

    A higher price need not lower the peak: in a U-Net, whose skips leave no narrow place, it makes the whole net again
    at once. The smallest peak of one was at a price ten million times below the highest.
    """
    return (highest * _APART**exponent for exponent in range(1, _PRICES + 1))


def _find_highest(problem: Problem) -> float:
    """A price for a byte at which nothing is worth keeping."""
    least = min((size for size in problem.sizes if size), default=1)
    return max(sum(problem.seconds) / least, 1e-30)
