"""A policy that does what a plan says in one region."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recollect._core.decisions import Site
from recollect._core.patterns import compile_pattern
from recollect._core.plans import Plan
from recollect._policy.base import Policy, Verdict
from recollect._policy.combine import Combination

_REPLAY = "replay"


@dataclass(frozen=True, slots=True, repr=False)
class ByPlan(Policy):
    """Decides by the choices of a plan, and is silent where none is for a value. Equal choices are equal policies."""

    plan: Plan
    words: str
    way: str | None = None
    holds_casts: bool = False

    @property
    def replays(self) -> bool | None:
        """As the plan says, which counted on it."""
        return None if self.way is None else self.way == _REPLAY

    @property
    def keeps_casts(self) -> bool:
        """As the plan says."""
        return self.holds_casts

    def judge(self, site: Site) -> Verdict | None:
        """By the first choice that is for the site."""
        decision = self.plan.decide(site)
        return None if decision is None else Verdict(decision, by=repr(self))

    def __repr__(self) -> str:
        return f"the plan {self.words}"


def follow_plan(plan: Plan, region: str) -> ByPlan:
    """What a plan says of one region; regions about which it says the same have equal policies."""
    mine = [choice for choice in plan.choices if choice.region is None or _is_for(choice.region, region)]
    own = Plan(choices=tuple(replace(choice, region=None) if not choice.is_exact else choice for choice in mine))
    planned = next((one for one in plan.regions if one.path == region), None)
    if planned is None:
        return ByPlan(own, own.digest[:12])
    return ByPlan(own, own.digest[:12], planned.way, planned.keeps_casts)


def goes_by_plan(policy: Policy) -> bool:
    """Whether a plan is at work, as a part or alone: it knows operators by the numbers of their calls."""
    return isinstance(policy, ByPlan) or (isinstance(policy, Combination) and any(map(goes_by_plan, policy.parts())))


def _is_for(pattern: str, region: str) -> bool:
    return compile_pattern(pattern)(region) if pattern else not region
