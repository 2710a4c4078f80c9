"""What decides about the values of a joint graph, made of a plan, a policy, a planner or a budget."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from recollect._compile.offloading import can_leave
from recollect._compile.speeds import carrier_of
from recollect._core.calls import OpCall
from recollect._core.decisions import Decision, Site
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._plan.budget import Budget
from recollect._plan.graphs import plan_within
from recollect._policy.base import Policy
from recollect._policy.judging import judge

_log = logging.getLogger("recollect")

Chooser = Callable[[OpCall, Site, Decision | None], Decision | None]
"""From a value, and what the tag of a region says of it, to a decision; None leaves it to the tag, or to torch."""


def by_plan(plan: Plan) -> Callable[[Profile, torch.device], Chooser]:
    """As a plan says."""

    def look(profile: Profile, _: torch.device) -> Chooser:
        if _log.isEnabledFor(logging.DEBUG):
            sites = [profile.calls[one.call].site(one.output) for one in profile.made()]
            _log.debug("choices that match nothing in this graph: %s", plan.unmatched(sites))
        return lambda call, site, tagged: plan.decide(site)

    return look


def by_planner(planner: Callable[[Profile], Plan]) -> Callable[[Profile, torch.device], Chooser]:
    """As a plan says that is made of the graph."""
    return lambda profile, device: by_plan(planner(profile))(profile, device)


def by_budget(budget: Budget, *, sends: bool) -> Callable[[Profile, torch.device], Chooser]:
    """What stays within a budget; with `sends`, values may go to host memory where that frees any."""

    def look(profile: Profile, device: torch.device) -> Chooser:
        carrier = carrier_of(device) if sends and can_leave(device) else None
        return by_plan(plan_within(budget, carrier)(profile))(profile, device)

    return look


def by_policy(policy: Policy) -> Callable[[Profile, torch.device], Chooser]:
    """As a policy says, outside of regions."""

    def choose(call: OpCall, site: Site, tagged: Decision | None) -> Decision | None:
        if tagged is not None:
            return None
        if _keeps_place(policy, call):
            return Decision.SAVE
        if policy.judge(site) is None and not (site.is_routing or site.is_collective):
            return None  # in a region that means to recompute; here nothing bounds how far that would go
        return judge(policy, site).decision

    return lambda profile, device: choose


def _keeps_place(policy: Policy, call: OpCall) -> bool:
    """Whether the call lies in a module, or under a name, that is kept whole."""
    parts = call.module.split(".") if call.module else []
    paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return any(policy.keeps_module(path, None) for path in paths) or any(map(policy.keeps_name, call.scopes))
