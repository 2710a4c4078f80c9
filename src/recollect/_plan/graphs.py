"""Which values a compiled step keeps within a budget: the whole graph at once, at a compiler's costs.

A compiler fuses what is recomputed pointwise into the kernel that reads it, so that it costs next to nothing and what
is worth keeping are products, attention, reductions and whatever else has a kernel of its own. With a price for bytes
the choice is a minimum cut, which HiGHS solves for graphs of thousands of nodes. A cut does not see when memory comes
and goes: kept or not, recomputation that runs through several blocks at once needs all of their values. So cuts are
tried with and without the *waists* of the forward pass forced to be kept, the few values that all of the rest depends
on, and `simulate` judges them. It does not know which nodes will really be fused, and judges bytes before fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from recollect._core.calls import Lifetime, OpCall
from recollect._core.decisions import Decision
from recollect._core.errors import BudgetError
from recollect._core.plans import Choice, Plan
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._plan.budget import FASTEST, Budget
from recollect._plan.problem import Problem, Run
from recollect._plan.simulate import Simulation, Simulator
from recollect._plan.solvers.keep_sets import Program
from recollect._plan.waists import find_waists

_FLOPS_PER_S, _BYTES_PER_S = 4e14, 3e12  # of today's accelerators: what counts is how many operations weigh a byte
_FUSED = 0.05  # of the time that a pointwise kernel of its own would take
_BISECTIONS = 10
_MARGIN = (
    0.05  # of what a step may take beyond its inputs: measured peaks of Inductor were up to 5% above the simulated
)
_REDUCING = ("mean", "sum", "var", "std", "amax", "amin", "norm", "prod", "argmax", "argmin", "logsumexp", "softmax")
_APART = ("sort", "topk", "scatter", "index_put", "cumsum", "cumprod", "bernoulli", "rand", "nonzero", "unique", "all_")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSet:
    """What a graph may keep, judged.

    Attributes:
        kept: the storages.
        peak_bytes: the most bytes in use at a time, before fusion, the graph's inputs included.
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
    priced = replace(profile, calls=tuple(replace(call, seconds=price(call)) for call in profile.calls))
    best: KeepSet | None = None
    for found in _list_keep_sets(priced, budget_bytes):
        if best is None or _rank(found, budget_bytes) < _rank(best, budget_bytes):
            best = found
    assert best is not None
    return best


def plan_within(budget: Budget) -> Callable[[Profile], Plan]:
    """What makes a plan of a joint graph that stays within a budget: a decision for each value of forward.

    The plan raises `BudgetError` where nothing fits; ``"fastest"`` leaves all to the compiler.
    """

    def make(profile: Profile) -> Plan:
        if budget.text == FASTEST or not profile.saved:
            return Plan(name=budget.text)
        found = find_keep_set(profile, _leave_room(profile, budget.bytes))
        if budget.bytes is not None and found.peak_bytes > budget.bytes:
            found = find_keep_set(profile, budget.bytes)
        if budget.bytes is not None and found.peak_bytes > budget.bytes:
            held = format_bytes(found.simulation.held_bytes)
            message = (
                f"no choice of values fits {format_bytes(budget.bytes)}: the smallest peak of this graph is "
                f"{format_bytes(found.peak_bytes)} before fusion, of which {held} are its inputs.\n"
                "Raise the budget, or shrink the batch"
            )
            raise BudgetError(message, found.peak_bytes)
        return Plan(name=budget.text, choices=tuple(_write(profile, found.kept)))

    return make


def _leave_room(profile: Profile, budget_bytes: int | None) -> int | None:
    """The budget less what fusion may add: several results of one kernel are there at a time."""
    if budget_bytes is None:
        return None
    held = sum(storage.bytes for storage in profile.storages if storage.lifetime is Lifetime.STEP)
    return budget_bytes - int(max(budget_bytes - held, 0) * _MARGIN)


def _write(profile: Profile, kept: frozenset[int]) -> Iterator[Choice]:
    for made in profile.made():
        if made.call < profile.forward_count:
            decision = Decision.SAVE if made.storage in kept else Decision.RECOMPUTE
            yield Choice.at(profile.calls[made.call].site(made.output), decision)


def price(call: OpCall) -> float:
    """What a call costs in seconds if a compiler makes it again in backward.

    >>> from recollect._core.calls import Value
    >>> x, y = Value(storage=0, shape=(1000,), bytes=4000), Value(storage=1, shape=(1000,), bytes=4000)
    >>> price(OpCall(op="aten.mul.Tensor", inputs=(x,), outputs=(y,))) < price(
    ...     OpCall(op="aten.cumsum.default", inputs=(x,), outputs=(y,))
    ... )
    True
    >>> price(OpCall(op="aten.view.default", inputs=(x,), outputs=(x,)))
    0.0
    """
    read = {value.storage for value in call.inputs}
    if all(value.storage in read for value in call.outputs) and not call.writes:
        return 0.0
    moved = sum(value.bytes for value in call.outputs)
    name = call.op.split(".")[1] if call.op.count(".") > 1 else call.op
    if call.flops:
        return max(call.flops / _FLOPS_PER_S, (moved + sum(value.bytes for value in call.inputs)) / _BYTES_PER_S)
    if any(word in name for word in (*_REDUCING, *_APART)) or call.is_routing or call.is_random:
        return (moved + sum(value.bytes for value in call.inputs)) / _BYTES_PER_S
    return _FUSED * moved / _BYTES_PER_S


def _rank(found: KeepSet, budget_bytes: int | None) -> tuple[float, float]:
    """Less is better: first what fits, by time; then what does not, by peak."""
    if budget_bytes is not None and found.peak_bytes <= budget_bytes:
        return 0.0, found.recomputed_s
    return float(found.peak_bytes), found.recomputed_s


def _list_keep_sets(profile: Profile, budget_bytes: int | None) -> Iterator[KeepSet]:
    problem, simulator = Problem(profile), Simulator(profile)
    (run,) = problem.runs_of("")
    always = _find_always(profile)
    plain = _judge(simulator, problem, run.needs | always)
    yield plain
    for there in dict.fromkeys((always, always.union(*find_waists(problem, run)))):
        program = Program(problem, run, needs=run.needs, there=there)
        low, high = 0.0, _find_highest(problem)
        small, large = _judge(simulator, problem, program.keep_at(high) | there), plain
        yield small
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


def _judge(simulator: Simulator, problem: Problem, kept: frozenset[int]) -> KeepSet:
    found = simulator.run(kept)
    again_s = sum(problem.seconds[step.call] for step in found.steps if step.again)
    return KeepSet(kept=kept, peak_bytes=max(found.bytes_at), recomputed_s=again_s, simulation=found)


def _find_always(profile: Profile) -> frozenset[int]:
    """What is kept in any case: results of the step, and of calls that must not run twice."""
    made = {one.storage: one.call for one in profile.made() if one.call < profile.forward_count}
    return frozenset(
        storage
        for storage, number in made.items()
        if profile.calls[number].runs_once or profile.storages[storage].lifetime is Lifetime.RETURNED
    )


def _find_highest(problem: Problem) -> float:
    """A price for a byte at which nothing is worth keeping."""
    least = min((size for size in problem.sizes if size), default=1)
    return max(sum(problem.seconds) / least, 1e-30)
