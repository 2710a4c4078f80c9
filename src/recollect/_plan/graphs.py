"""Which values a compiled step keeps within a budget: the whole graph at once, at a compiler's costs.

A compiler fuses what is pointwise into the kernel that reads it. What never reaches memory (`fusing.py`) takes none and
is never kept: keeping it would cost the writing. With a price for bytes the choice among the rest is a minimum cut,
which HiGHS solves for graphs of thousands of nodes. A cut does not see when memory comes and goes: kept or not,
recomputation that runs through several blocks at once needs all of their values. So cuts are tried with and without the
values forced to be kept that cross the *valleys* of forward (`waists.py`), and `simulate` judges them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from recollect._core.calls import Lifetime, OpCall
from recollect._core.decisions import Decision
from recollect._core.errors import BudgetError
from recollect._core.plans import Choice, Plan
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._plan.budget import FASTEST, Budget
from recollect._plan.fusing import fuse, is_pointwise, is_reducing, is_view
from recollect._plan.problem import Problem, Run
from recollect._plan.sent_values import Carrier, Sending, Sent
from recollect._plan.simulate import Simulation, Simulator
from recollect._plan.solvers.program import IntegerProgram
from recollect._plan.waists import find_valleys

_log = logging.getLogger("recollect")

_FLOPS_PER_S, _BYTES_PER_S = 4e14, 3e12  # of today's accelerators: what counts is how many operations weigh a byte
_FUSED = 0.05  # of the time that a pointwise kernel of its own would take, if its result is written nowhere
_BISECTIONS = 10
_APART, _PRICES = 0.1, 11  # how far apart prices are that are tried in any case, and how many
_TRIES, _FEW_TRIES = 48, 12  # to keep more, of the best and of any
_STRIDES = (1, 2, 4)  # through the valleys: of a transformer's every second one lies between two blocks
_OF_MANY = 32  # times as large is what statistics are made of, at least
_SENT_SHARES = (0.25, 0.5, 0.75, 1.0)  # of what the link carries in forward: kept beyond the budget, and sent
_DESCENT, _DESCENTS = 0.01, 4  # of the smallest peak, how much less is asked for, and how often
_NEARLY = 1.001  # as small: for some bytes less, a step may recompute several times as much
_MARGIN = 0.05  # of what a step may take beyond its inputs: measured peaks of small models were up to 5% above


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


def find_keep_set(profile: Profile, budget_bytes: int | None, carrier: Carrier | None = None) -> KeepSet:
    """The storages to keep of a joint graph so that its peak stays within a budget; with None, the smallest peak.

    Where nothing fits, it is the one with the smallest peak, too: whoever asks must look.

    Args:
        profile: the joint graph.
        budget_bytes: for the peak.
        carrier: takes some of what is kept to the host and back; None: all stays.
    """
    priced, gone = _price_all(profile)
    judge = _Judge(priced, budget_bytes)
    (run,) = judge.problem.runs_of("")
    best = _find_smallest(judge, run) if budget_bytes is None else _find_within(judge, run)
    if carrier is not None:
        best = _find_with_sending(judge, run, best, carrier)
    return replace(best, kept=best.kept - gone)


def _find_within(judge: _Judge, run: Run) -> KeepSet:
    _try_all(judge, run)
    return judge.describe(_keep_more(judge, run, judge.best))


def _find_smallest(judge: _Judge, run: Run) -> KeepSet:
    """The smallest peak, and the quickest choice that nearly has it: as budgets find it that ask for less each time.

    A budget tries to keep other values than who asks for the smallest peak, and may come out lower.
    """
    found = [_find_within(judge, run)]
    less = 1 - _DESCENT
    for _ in range(_DESCENTS):
        judge.budget_bytes = int(found[-1].peak_bytes * less)
        found.append(_find_within(judge, run))
        if found[-1].peak_bytes >= found[-2].peak_bytes:
            break
    judge.begin(min(one.peak_bytes for one in found))
    found.append(_find_within(judge, run))
    judge.begin(None)
    most_bytes = int(min(one.peak_bytes for one in found) * _NEARLY)
    return min((one for one in found if one.peak_bytes <= most_bytes), key=lambda one: one.recomputed_s)


def _find_with_sending(judge: _Judge, run: Run, alone: KeepSet, carrier: Carrier) -> KeepSet:
    """Keep more than fits, and send the first values away; the quickest of some such choices that fit.

    Without a budget, the smallest peak and whatever lowers it further.
    """
    budget_bytes = judge.budget_bytes
    whole = Sending(judge.problem.profile, alone.simulation, alone.kept, carrier)
    found = [(whole, whole.judge(()), alone)]
    more = (0.0,) if budget_bytes is None else (0.0, *_SENT_SHARES)
    for share in more:
        judge.budget_bytes = None if budget_bytes is None else _raise(budget_bytes, whole, carrier, share)
        kept = alone if not share else _find_within(judge, run)
        sending = Sending(judge.problem.profile, kept.simulation, kept.kept, carrier)
        found.append((sending, sending.send_within(budget_bytes), kept))
    judge.budget_bytes = budget_bytes

    def rank(one: tuple[Sending, Sent, KeepSet]) -> tuple[float, float]:
        sending, sent, _ = one
        fits = budget_bytes is not None and sent.simulation.peak_bytes <= budget_bytes
        return (0.0 if fits else float(sent.simulation.peak_bytes)), sending.recomputed_s + sent.waits_s

    _, sent, kept = min(found, key=rank)
    return replace(kept, peak_bytes=sent.simulation.peak_bytes, simulation=sent.simulation, sent=sent.storages)


def _raise(budget_bytes: int, sending: Sending, carrier: Carrier, share: float) -> int:
    """A budget and a share of what the link carries in forward."""
    return budget_bytes + int(share * sending.forward_s * carrier.bytes_per_s)


def _price_all(profile: Profile) -> tuple[Profile, frozenset[int]]:
    """The step as a compiler will run it, with what each call costs, and the storages that are written nowhere."""
    fused, gone = fuse(profile)
    calls = (replace(call, seconds=price(call, is_written=gone.isdisjoint(_made_by(call)))) for call in fused.calls)
    return replace(fused, calls=tuple(calls)), gone


def _made_by(call: OpCall) -> Iterator[int]:
    return (value.storage for value in call.outputs)


def plan_within(budget: Budget, carrier: Carrier | None = None) -> Callable[[Profile], Plan]:
    """What makes a plan of a joint graph that stays within a budget: a decision for each value of forward.

    The plan raises `BudgetError` where nothing fits; ``"fastest"`` leaves all to the compiler.

    Args:
        budget: for the peak.
        carrier: what takes values to the host, if they may go there.
    """

    def make(profile: Profile) -> Plan:
        if budget.text == FASTEST or not profile.saved:
            return Plan(name=budget.text)
        room = _leave_room(profile, budget.bytes)
        found = find_keep_set(profile, room, carrier)
        if budget.bytes is not None and found.peak_bytes > budget.bytes:
            found = find_keep_set(profile, budget.bytes, carrier)
        if budget.bytes is not None and found.peak_bytes > budget.bytes:
            found = find_keep_set(profile, None, carrier)
        if budget.bytes is not None and found.peak_bytes > budget.bytes:
            held = format_bytes(found.simulation.held_bytes)
            message = (
                f"no choice of values fits {format_bytes(budget.bytes)}: the smallest reachable peak of this graph is "
                f"{format_bytes(found.peak_bytes)}, and its inputs alone take {held}.\n"
                "Raise the budget, or shrink the batch"
            )
            raise BudgetError(message, found.peak_bytes)
        if budget.bytes is not None and room is not None and found.peak_bytes > room:
            _log.warning(
                "partitioner(budget=%r): %s of it stay free in this graph, less than the %s that kernels may need for "
                "themselves, so the step may take more. Raise the budget by as much, or measure the step.",
                budget.text,
                format_bytes(budget.bytes - found.peak_bytes),
                format_bytes(budget.bytes - room),
            )
        return Plan(name=budget.text, choices=tuple(_write(profile, found)))

    return make


def _leave_room(profile: Profile, budget_bytes: int | None) -> int | None:
    """The budget less what cannot be foreseen: how kernels are cut, and what Inductor holds on to.

    Copies of inputs, which no call reads, are the compiler's own, and count with what it makes.
    """
    if budget_bytes is None:
        return None
    read = frozenset[int]().union(*(call.reads for call in profile.calls))
    held = sum(profile.storages[at].bytes for at in read if profile.storages[at].lifetime is Lifetime.STEP)
    return budget_bytes - int(max(budget_bytes - held, 0) * _MARGIN)


def _write(profile: Profile, found: KeepSet) -> Iterator[Choice]:
    for made in profile.made():
        if made.call < profile.forward_count:
            is_kept, is_sent = made.storage in found.kept, made.storage in found.sent
            decision = Decision.OFFLOAD if is_sent else Decision.SAVE if is_kept else Decision.RECOMPUTE
            yield Choice.at(profile.calls[made.call].site(made.output), decision)


def price(call: OpCall, *, is_written: bool = False) -> float:
    """What a call costs in seconds if a compiler makes it again in backward.

    Args:
        call: which.
        is_written: whether what it gives is written to memory, even if it is pointwise.

    >>> from recollect._core.calls import Value
    >>> x, y = Value(storage=0, shape=(1000,), bytes=4000), Value(storage=1, shape=(1000,), bytes=4000)
    >>> mul = OpCall(op="aten.mul.Tensor", inputs=(x,), outputs=(y,))
    >>> price(mul) < price(mul, is_written=True)
    True
    >>> price(OpCall(op="aten.view.default", inputs=(x,), outputs=(x,)))
    0.0
    """
    if is_view(call):
        return 0.0
    made = sum(value.bytes for value in call.outputs)
    moved = made + sum(value.bytes for value in call.inputs)
    if is_pointwise(call) and not is_written:
        return _FUSED * made / _BYTES_PER_S
    return max(call.flops / _FLOPS_PER_S, moved / _BYTES_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A keep set and what it takes, without the simulation, which is large: hundreds are judged."""

    kept: frozenset[int]
    peak_bytes: int
    recomputed_s: float


class _Judge:
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


def _try_all(judge: _Judge, run: Run) -> None:
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


def _mix(judge: _Judge, run: Run, small: _Found, large: _Found) -> None:
    """Between two keep sets: identical blocks change their minds at the same price, the last ones are to do so first.

    What the last blocks keep is gone first in backward.
    """
    assert judge.budget_bytes is not None
    more = _by_maker(run, large.kept - small.kept)
    _fill(judge, small, list(more.values())[::-1], judge.budget_bytes, tries=_FEW_TRIES)


def _keep_more(judge: _Judge, run: Run, found: _Found) -> _Found:
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


def _fill(judge: _Judge, found: _Found, more: list[frozenset[int]], limit_bytes: int, *, tries: int = _TRIES) -> _Found:
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
