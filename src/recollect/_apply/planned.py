"""A plan meets a model: its regions are found by path, and each is told what to keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from recollect._apply.offloading import Elsewhere
from recollect._apply.options import Choices
from recollect._apply.rules import RegionRule, describe_away
from recollect._apply.targets import Target, by_name
from recollect._core.argument_text import with_article
from recollect._core.forecasts import PlannedRegion
from recollect._core.patterns import did_you_mean, nearest_paths, plain_path
from recollect._core.plans import Plan
from recollect._core.sharded import is_sharded
from recollect._offload.offload import Offload, TierLike, make_offload
from recollect._policy.by_plan import follow_plan
from recollect._recompute.joins import Joining, Joins

_RERUN, _REPLAY, _OFFLOAD = "rerun", "replay", "offload"


def choose_planned(
    model: nn.Module, targets: list[Target], plan: Plan, *, every: int | None = None, first: int | None = None
) -> list[tuple[Target, RegionRule]]:
    """The modules that a plan makes regions, each with what is to become of it.

    Raises:
        ValueError: the plan was made for another model, or names no regions; or an option is given that is for rules.
    """
    if every is not None or first is not None:
        given = f"every={every}" if every is not None else f"first={first}"
        message = f"{given} only works with rules: a plan already names its modules"
        raise ValueError(message)
    if not plan.regions and plan.choices:
        message = (
            f"plan {plan.name!r} names no regions: it decides about values, not modules. Pass it to "
            "`recollect.partitioner`, or make one for this model: "
            "recollect.plan(recollect.profile(model, ...), budget=...)"
        )
        raise ValueError(message)
    names = by_name(targets)
    owned = _size_parameters(names[""].chain[-1] if "" in names else model)
    chosen: list[tuple[Target, RegionRule]] = []
    shared = functools.cache(_make_away)  # one for all modules, which are parts of one step
    joins, givers = Joins(), {region.joined_to for region in plan.regions}
    for region in plan.regions:
        target = names.get(region.path)
        why = _misfit(region, target, names, owned)
        if target is None or why:
            raise ValueError(_refuse(model, plan, why))
        joining = Joining(joins=joins, gives=region.path in givers, takes=bool(region.joined_to))
        rule = _make_rule(plan, region, shared, joining if joining.gives or joining.takes else None)
        if rule.choices is not None and rule.choices.policy is not None:
            # Around what torch.compile returned nothing inside can be kept; inside, its graph knows the region.
            target = replace(target, chain=target.chain[-1:])
        chosen.append((target, rule))
    return chosen


def _make_away(tier: str) -> Offload:
    return make_offload(_read_tier(tier))


def _read_tier(tier: str) -> TierLike:
    names = tuple(tier.split(", "))
    return names[0] if len(names) == 1 else names


def _make_rule(
    plan: Plan, region: PlannedRegion, shared: Callable[[str], Offload], joining: Joining | None
) -> RegionRule:
    text = f"plan {plan.name}".rstrip()
    is_sent = region.way == _OFFLOAD
    tier = region.tier or "host"
    away = shared(tier) if region.tier or is_sent else None
    words = [] if away is None else [describe_away(away)]
    if is_sent:
        return RegionRule(matches=lambda name, module: True, choices=None, text=text, what=words[0], away=away)
    policy = None if region.way == _RERUN else follow_plan(plan, region.path)
    keeps = [f"keep {region.keeps}"] if region.keeps else []
    elsewhere = None
    if away is not None and region.way == _REPLAY:  # only what its choices say goes, and nothing is around the region
        elsewhere, away = Elsewhere(to=_read_tier(tier), takes_inputs=False, shared=away), None
    return RegionRule(
        matches=lambda name, module: True,
        choices=Choices(policy=policy, elsewhere=elsewhere, joining=joining),
        text=text,
        what=", ".join(["recompute", *keeps, *words]),
        away=away,
    )


def _size_parameters(model: nn.Module) -> dict[str, int]:
    """The bytes of parameters, by path, shared ones once: where a profile finds them, too.

    Nothing where they are sharded: each process may have a different part.
    """
    parameters = {plain_path(path): parameter for path, parameter in model.named_parameters()}
    if any(map(is_sharded, parameters.values())):
        return {}
    return {path: parameter.numel() * parameter.element_size() for path, parameter in parameters.items()}


def _misfit(region: PlannedRegion, target: Target | None, names: dict[str, Target], owned: dict[str, int]) -> str:
    """Why a region cannot be the one that the plan was made for; empty if it can."""
    if target is None:
        near = nearest_paths(region.path, names)
        return f"has no module '{region.path}'" + (f" ({did_you_mean(near[:3])})" if near else "")
    module = target.chain[-1]
    if type(module).__name__ != region.kind:
        found = with_article(type(module).__name__)
        return f"has {found} at '{region.path}', where the plan saw {with_article(region.kind)}"
    size = sum(size for path, size in owned.items() if path.startswith(f"{region.path}."))
    if region.parameter_bytes and size and size != region.parameter_bytes:
        return f"has {size} bytes of parameters in '{region.path}', where the plan saw {region.parameter_bytes}"
    return ""


def _refuse(model: nn.Module, plan: Plan, why: str) -> str:
    made_for = plan.fingerprint.model if plan.fingerprint is not None and plan.fingerprint.model else "another model"
    return (
        f"plan {plan.name!r} was made for {made_for} and does not fit {type(model).__name__}, which {why}.\n"
        "Make one for this model within the same budget: recollect.plan(recollect.profile(model, ...), budget=plan)"
    )
