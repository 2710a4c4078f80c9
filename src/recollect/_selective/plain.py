"""Regions whose policy keeps everything: a plain call, for which autograd holds what it always does.

Kept operator by operator, such a region would hold more: results that backward has no use for, beside what autograd
saves. Nothing is recomputed, so nothing has to be noted either. Only the first call of each kind is looked at, for
`recollect.explain`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recollect._core.authors import Role
from recollect._core.decisions import Decision
from recollect._core.operators import Operator
from recollect._policy.base import DecisionPolicy, Policy
from recollect._policy.combine import PerRegion
from recollect._policy.rules import SaveAll
from recollect._selective.asking import Asker
from recollect._selective.decisions import RECOMPUTED, DecisionLine, Decisions
from recollect._selective.keeping_mode import KeepingMode
from recollect._selective.kept_calls import KeptCalls
from recollect._selective.knowledge import Knowledge

__recollect_role__ = Role.REGION


def keeps_all(policy: Policy, region: str) -> bool:
    """Whether a policy keeps every value of a region, so that nothing is recomputed.

    >>> from recollect import policies
    >>> keeps_all(policies.save_all, "block"), keeps_all(policies.save_matmuls, "block")
    (True, False)
    """
    if isinstance(policy, PerRegion):
        policy = policy.within(region)
    return isinstance(policy, SaveAll) or (isinstance(policy, DecisionPolicy) and policy.decision is Decision.SAVE)


def run_plain(
    knowledge: Knowledge, decisions: Decisions, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the function; note what it runs if this was never seen."""
    if decisions.is_learned:
        decisions.unwatched += 1
        return fn(*args, **kwargs)
    asker = Asker(decisions, knowledge.places(), scopes=[])

    def note(func: Any, operator: Operator, call: int, args: Any, kwargs: Any, result: Any) -> DecisionLine:  # noqa: PLR0917
        asker.decide(func, operator, call, args, kwargs, result)
        return RECOMPUTED  # so that the mode holds nothing

    with KeepingMode(KeptCalls(knowledge.region, None), note):
        result = fn(*args, **kwargs)
    decisions.learn(saved=0, kept=0, sees_all=True)
    return result
