"""Which values a compiled step keeps within a budget: the whole graph at once, at a compiler's costs.

A compiler fuses what is pointwise into the kernel that reads it. What never reaches memory (`fusing.py`) takes none and
is never kept: keeping it would cost the writing. With a price for bytes the choice among the rest is a minimum cut,
which HiGHS solves for graphs of thousands of nodes. A cut does not see when memory comes and goes: kept or not,
recomputation that runs through several blocks at once needs all of their values. So cuts are tried with and without the
values forced to be kept that cross the *valleys* of forward (`waists.py`), and `simulate` judges them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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
from recollect._plan.simulate import Simulation, Simulator
from recollect._plan.solvers.keep_sets import IntegerProgram
from recollect._plan.waists import find_valleys

_log = logging.getLogger("recollect")

_FLOPS_PER_S, _BYTES_PER_S = 4e14, 3e12  # of today's accelerators: what counts is how many operations weigh a byte
_FUSED = 0.05  # of the time that a pointwise kernel of its own would take, if its result is written nowhere
_BISECTIONS = 10
_APART, _PRICES = 0.1, 11  # how far apart prices are that are tried in any case, and how many
_FAILURES = 8  # in a row, after which nothing more is tried: the kernels of a block, about
_STRIDES = (1, 2)  # through the valleys: of a transformer's every second one lies between two blocks
_OF_MANY = 32  # times as large is what statistics are made of, at least
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
    """

    kept: frozenset[int]
    peak_bytes: int
    recomputed_s: float
    simulation: Simulation


def find_keep_set(profile: Profile, budget_bytes: int | None) -> KeepSet:
    """The storages to keep of a joint graph so that its peak stays within a budget; with None, the smallest peak.

    Where nothing fits, it is the one with the smallest peak, too: whoever asks must look.
    """
    fused, gone = fuse(profile)
    calls = (replace(call, seconds=price(call, is_written=gone.isdisjoint(_made_by(call)))) for call in fused.calls)
    priced = replace(fused, calls=tuple(calls))
    problem, simulator = Problem(priced), Simulator(priced)
    (run,) = problem.runs_of("")
    best: KeepSet | None = None
    for found in _list_keep_sets(simulator, problem, run, budget_bytes):
        if best is None or _rank(found, budget_bytes) < _rank(best, budget_bytes):
            best = found
    assert best is not None
    best = _keep_more(simulator, problem, run, best, budget_bytes)
    return replace(best, kept=best.kept - gone)


def _made_by(call: OpCall) -> Iterator[int]:
    return (value.storage for value in call.outputs)


def plan_within(budget: Budget) -> Callable[[Profile], Plan]:
    """What makes a plan of a joint graph that stays within a budget: a decision for each value of forward.

    The plan raises `BudgetError` where nothing fits; ``"fastest"`` leaves all to the compiler.
    """

    def make(profile: Profile) -> Plan:
        if budget.text == FASTEST or not profile.saved:
            return Plan(name=budget.text)
        room = _leave_room(profile, budget.bytes)
        found = find_keep_set(profile, room)
        if budget.bytes is not None and found.peak_bytes > budget.bytes:
            found = find_keep_set(profile, budget.bytes)
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
        return Plan(name=budget.text, choices=tuple(_write(profile, found.kept)))

    return make


def _leave_room(profile: Profile, budget_bytes: int | None) -> int | None:
    """The budget less what cannot be foreseen: how kernels are cut, and what Inductor holds on to."""
    if budget_bytes is None:
        return None
    held = sum(storage.bytes for storage in profile.storages if storage.lifetime is Lifetime.STEP)
    return budget_bytes - int(max(budget_bytes - held, 0) * _MARGIN)


def _write(profile: Profile, kept: frozenset[int]) -> Iterator[Choice]:
    for made in profile.made():
        if made.call < profile.forward_count:
            decision = Decision.SAVE if made.storage in kept else Decision.RECOMPUTE
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


def _rank(found: KeepSet, budget_bytes: int | None) -> tuple[float, float]:
    """Less is better: first what fits, by time; then what does not, by peak."""
    if budget_bytes is not None and found.peak_bytes <= budget_bytes:
        return 0.0, found.recomputed_s
    return float(found.peak_bytes), found.recomputed_s


def _list_keep_sets(simulator: Simulator, problem: Problem, run: Run, budget_bytes: int | None) -> Iterator[KeepSet]:
    always = _find_always(problem.profile)
    plain = _judge(simulator, problem, run.needs | always)
    yield plain
    ways = (find_valleys(problem, run), find_valleys(problem, run, across_skips=True))
    crossings = (always.union(*valleys[::stride]) for valleys in ways for stride in _STRIDES)
    for there in dict.fromkeys((always, *crossings)):
        program = IntegerProgram(problem, run, needs=run.needs, there=there)
        low, high = 0.0, _find_highest(problem)
        small, large = _judge(simulator, problem, program.keep_at(high) | there), plain
        yield small
        for price_of_byte in _list_prices(high) if there == always else ():
            found = _judge(simulator, problem, program.keep_at(price_of_byte) | there)
            yield found
            if budget_bytes is not None and found.peak_bytes <= budget_bytes:
                low, high, small = price_of_byte * _APART, price_of_byte, found
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5 if low else high / 2**_BISECTIONS
            found = _judge(simulator, problem, program.keep_at(middle) | there)
            yield found
            if budget_bytes is not None and found.peak_bytes <= budget_bytes:
                high, small = middle, found
            else:
                low, large = middle, found
        if budget_bytes is not None and small.peak_bytes <= budget_bytes:
            yield from _mix(simulator, problem, run, small, large, budget_bytes)


def _mix(  # noqa: PLR0917
    simulator: Simulator, problem: Problem, run: Run, small: KeepSet, large: KeepSet, budget_bytes: int
) -> Iterator[KeepSet]:
    """Between two keep sets: identical blocks change their minds at the same price, the last ones are to do so first.

    What the last blocks keep is gone first in backward.
    """
    more = sorted(large.kept - small.kept, key=lambda storage: -run.makes[storage][0])
    low, high = 0, len(more)
    while high - low > 1:
        middle = (low + high) // 2
        found = _judge(simulator, problem, small.kept.union(more[:middle]))
        yield found
        low, high = (middle, high) if found.peak_bytes <= budget_bytes else (low, middle)


def _keep_more(simulator: Simulator, problem: Problem, run: Run, found: KeepSet, budget_bytes: int | None) -> KeepSet:
    """Keep also what products, convolutions and attention give, the last ones first, where there is room for it.

    At one price for a byte a value goes, however short its life: logits, which are there again before the peak.
    """
    limit = found.peak_bytes if budget_bytes is None else max(found.peak_bytes, budget_bytes)
    dropped = {
        storage: call
        for storage, (call, *_) in run.makes.items()
        if storage not in found.kept and call in found.simulation.recomputed_calls and problem.profile.calls[call].flops
    }
    failures = 0
    for storage in sorted(dropped, key=dropped.__getitem__, reverse=True):
        more = _judge(simulator, problem, found.kept | {storage})
        if more.peak_bytes <= limit and more.recomputed_s < found.recomputed_s:
            found, failures = more, 0
        else:
            failures += 1
        if failures == _FAILURES:
            break
    return found


def _judge(simulator: Simulator, problem: Problem, kept: frozenset[int]) -> KeepSet:
    found = simulator.run(kept)
    again_s = sum(problem.seconds[step.call] for step in found.steps if step.again)
    return KeepSet(kept=kept, peak_bytes=max(found.bytes_at), recomputed_s=again_s, simulation=found)


def _find_always(profile: Profile) -> frozenset[int]:
    """What is kept in any case: results of the step, of calls that must not run twice, and statistics.

    Those are the few numbers that a norm or a softmax makes of many. Made again in backward they would be one kernel
    with what reads them there, which then reads its input more than once and cannot write into it: a second copy of the
    logits, for the sake of two numbers for each token.
    """
    made = {one.storage: one.call for one in profile.made() if one.call < profile.forward_count}
    return frozenset(
        storage
        for storage, number in made.items()
        if profile.calls[number].runs_once
        or profile.storages[storage].lifetime is Lifetime.RETURNED
        or _is_statistic(profile.calls[number])
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
