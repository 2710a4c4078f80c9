"""Which values a compiled step keeps within a budget: the whole graph at once, at a compiler's costs.

A compiler fuses what is pointwise into the kernel that reads it (`graph_prices.py`). What never reaches memory
(`fusing.py`) takes none and is never kept: keeping it would cost the writing. Among the rest `keep_set_search.py` finds
what fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from recollect._core.calls import Lifetime
from recollect._core.decisions import Decision
from recollect._core.errors import BudgetError
from recollect._core.plans import Choice, Plan
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._plan.budget import FASTEST, Budget
from recollect._plan.graph_prices import price_all
from recollect._plan.keep_set_search import Judge, KeepSet, find_within
from recollect._plan.problem import Run
from recollect._plan.sent_values import Carrier, Sending, Sent

_log = logging.getLogger("recollect")

_SENT_SHARES = (0.25, 0.5, 0.75, 1.0)  # of what the link carries in forward: kept beyond the budget, and sent
_DESCENT, _DESCENTS = 0.01, 4  # of the smallest peak, how much less is asked for, and how often
_NEARLY = 1.001  # as small: for some bytes less, a step may recompute several times as much
_MARGIN = 0.05  # of what a step may take beyond its inputs: measured peaks of small models were up to 5% above


def find_keep_set(profile: Profile, budget_bytes: int | None, carrier: Carrier | None = None) -> KeepSet:
    """The storages to keep of a joint graph so that its peak stays within a budget; with None, the smallest peak.

    Where nothing fits, it is the one with the smallest peak, too: whoever asks must look.

    Args:
        profile: the joint graph.
        budget_bytes: for the peak.
        carrier: takes some of what is kept to the host and back; None: all stays.
    """
    priced, gone = price_all(profile)
    judge = Judge(priced, budget_bytes)
    (run,) = judge.problem.runs_of("")
    best = _find_smallest(judge, run) if budget_bytes is None else find_within(judge, run)
    if carrier is not None:
        best = _find_with_sending(judge, run, best, carrier)
    return replace(best, kept=best.kept - gone)


def _find_smallest(judge: Judge, run: Run) -> KeepSet:
    """The smallest peak, and the quickest choice that nearly has it: as budgets find it that ask for less each time.

    A budget tries to keep other values than who asks for the smallest peak, and may come out lower.
    """
    found = [find_within(judge, run)]
    less = 1 - _DESCENT
    for _ in range(_DESCENTS):
        judge.budget_bytes = int(found[-1].peak_bytes * less)
        found.append(find_within(judge, run))
        if found[-1].peak_bytes >= found[-2].peak_bytes:
            break
    judge.begin(min(one.peak_bytes for one in found))
    found.append(find_within(judge, run))
    judge.begin(None)
    most_bytes = int(min(one.peak_bytes for one in found) * _NEARLY)
    return min((one for one in found if one.peak_bytes <= most_bytes), key=lambda one: one.recomputed_s)


def _find_with_sending(judge: Judge, run: Run, alone: KeepSet, carrier: Carrier) -> KeepSet:
    """Keep more than fits, and send the first values away; the quickest of some such choices that fit.

    Without a budget, the smallest peak and whatever lowers it further.
    """
    budget_bytes = judge.budget_bytes
    whole = Sending(judge.problem.profile, alone.simulation, alone.kept, carrier)
    found = [(whole, whole.judge(()), alone)]
    more = (0.0,) if budget_bytes is None else (0.0, *_SENT_SHARES)
    for share in more:
        judge.budget_bytes = None if budget_bytes is None else _raise(budget_bytes, whole, carrier, share)
        kept = alone if not share else find_within(judge, run)
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
