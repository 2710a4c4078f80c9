"""Our own contenders: plans at shares of what the plain step takes, and budgets for compiled graphs."""

from __future__ import annotations

import functools

from recollect._apply.model import apply
from recollect._bench.contenders import OURS, Contender
from recollect._compile.partition import partitioner
from recollect._core.errors import BudgetError
from recollect._core.profiles import Profile
from recollect._fit.plan import plan as make_plan

SHARES = (90, 75, 60, 50, 40, 30, 20)
QUICK_SHARES = (75, 50, 30)
HOST_SHARES = (60, 40, 30, 20)
"""Where plans may also send values to host memory: above these hardly any plan does."""


def list_plans(seen: Profile, shares: tuple[int, ...], *, tiers: str | None = None) -> list[Contender]:
    """A plan for each share of what the plain step takes beyond what is there before it, and the smallest.

    Args:
        seen: the plain step.
        shares: in percent.
        tiers: where plans may send values to.
    """
    held = seen.timeline.held_bytes
    span = seen.peak_bytes - held
    found = []
    every: tuple[int | str, ...] = (*shares, "min")
    for share in every:
        name = name_share(share, tiers=tiers)
        budget = share if isinstance(share, str) else held + span * share // 100
        try:
            plan = make_plan(seen, budget=budget, tiers=tiers)
        except BudgetError as error:
            found.append(Contender(name=name, family=OURS, absent=explain_refusal(error, held, span)))
        else:
            found.append(Contender(name=name, family=OURS, prepare=functools.partial(apply, rules=plan), plan=plan))
    return found


def list_compiled(
    held_bytes: int, span_bytes: int, shares: tuple[int, ...], *, tiers: str | None = None
) -> list[Contender]:
    """A budget for the graph of the step for each share, and the smallest.

    Args:
        held_bytes: what the graph is given.
        span_bytes: what the plain compiled step takes beyond what is there before it.
        shares: in percent.
        tiers: where graphs may send values to.
    """
    found = []
    every: tuple[int | str, ...] = (*shares, "min")
    for share in every:
        budget = share if isinstance(share, str) else held_bytes + span_bytes * share // 100
        options = {"custom_partitioner_fn": partitioner(budget=budget, tiers=tiers)}
        found.append(Contender(name=name_share(share, tiers=tiers), family=OURS, options=options))
    return found


def name_share(share: int | str, *, tiers: str | None = None) -> str:
    """What tables call one of ours.

    >>> name_share(50), name_share("min", tiers="host")
    ('recollect 50%', 'recollect min, host')
    """
    where = f", {tiers}" if tiers else ""
    return f"{OURS} {share}{'%' if isinstance(share, int) else ''}{where}"


def explain_refusal(error: BudgetError, held_bytes: int, span_bytes: int) -> str:
    """Why there is no plan, in the table's terms."""
    return f"no plan: the smallest is {(error.smallest_bytes - held_bytes) / max(span_bytes, 1):.0%}"
