"""Which modules become regions under which rule: the first rule that matches a module decides about it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from torch.nn.parallel import DataParallel

from recollect._apply.blocks import find_blocks
from recollect._apply.options import Choices
from recollect._apply.rules import (
    RegionRule,
)
from recollect._apply.sent_forward import SentForward, sent_forward_of
from recollect._apply.stand_in import stand_in_of
from recollect._apply.targets import Target, by_name, describe_unmatched
from recollect._core.units import list_some
from recollect._offload.offload import Offload, Passing, Staying
from recollect._policy.base import Policy
from recollect._policy.combine import first_match
from recollect._policy.places import save_modules

Chosen = list[tuple[Target, RegionRule]]


def match_rules(model: nn.Module, targets: list[Target], rules: list[RegionRule]) -> Chosen:
    """For each module the first rule that matches it; every rule must match something.

    Raises:
        ValueError: one does not.
    """
    chosen: Chosen = []
    matched: dict[int, list[Target]] = {index: [] for index in range(len(rules))}
    decides = [False] * len(rules)
    for target in targets:
        found = [index for index, rule in enumerate(rules) if _is_meant(rule, target)]
        for index in found:
            matched[index].append(target)
        if found and target.is_called:
            chosen.append((target, rules[found[0]]))
            decides[found[0]] = True
    for index, rule in enumerate(rules):
        if not any(target.is_called for target in matched[index]):
            raise ValueError(_describe_no_match(model, targets, rule, matched[index]))
        if not decides[index]:
            message = f"rule {rule.text} has no effect: earlier rules match all of its modules. Put it before them"
            warnings.warn(message, UserWarning, stacklevel=3)
    return chosen


def _is_meant(rule: RegionRule, target: Target) -> bool:
    return any(rule.matches(name, module) for name in target.names for module in target.chain)


def _describe_no_match(model: nn.Module, targets: list[Target], rule: RegionRule, lists: list[Target]) -> str:
    if lists:
        names = list_some([f"'{target.name}'" for target in lists])
        inner = f"'{lists[0].name}.*'"
        kind = type(lists[0].chain[-1]).__name__
        return (
            f"rule {rule.text} matches only {names} of {type(model).__name__}, but a {kind} is never "
            f"called itself. Match the modules in it: {inner}"
        )
    if rule.pattern is not None:
        return describe_unmatched(rule.pattern, model, targets)
    classes = list(dict.fromkeys(type(target.chain[-1]).__name__ for target in targets if target.is_called))
    return f"rule {rule.text} matches no module of {type(model).__name__}; its classes are {list_some(classes)}"


def choose_blocks(model: nn.Module, targets: list[Target], rule: RegionRule) -> Chosen:
    """The model's repeated blocks.

    Raises:
        ValueError: there are none.
    """
    blocks = set(find_blocks(model))
    chosen = [(target, rule) for target in targets if blocks.intersection(target.chain)]
    if not chosen:
        largest = sorted((t for t in targets if t.name and t.is_called), key=_count_parameters, reverse=True)
        near = list_some([f"'{target.name}'" for target in largest], most=4)
        message = (
            f"{type(model).__name__} has no repeated blocks: no ModuleList or Sequential in it holds "
            "two or more modules of the same class, apart from torch's own layers.\n"
            "Name the modules to recompute: recollect.apply(model, "
            f"{{'name': recollect.Decision.RECOMPUTE}}). "
            + (
                f"Its largest modules are {near}"
                if near
                else "It has no modules inside: use recollect.checkpoint(model)"
            )
        )
        raise ValueError(message)
    return chosen


def _count_parameters(target: Target) -> int:
    return sum(parameter.numel() for parameter in target.chain[-1].parameters())


def regions_in(chosen: Chosen) -> list[Target]:
    return [target for target, rule in chosen if rule.choices is not None]


def thin_out(chosen: Chosen, every: int, first: int | None) -> Chosen:
    """Leave out regions, and whatever lies only inside of those that are left out."""
    if every == 1 and first is None:
        return chosen
    acting = [target for target, rule in chosen if rule.acts]
    regions = by_name(acting)
    outermost = [target for target in acting if next(target.inside(regions), None) is None]
    stay = {id(target) for target in outermost[slice(0, first, every)]}
    gone = {id(target) for target in outermost} - stay

    def stays(target: Target) -> bool:
        around = {id(region) for region, _ in target.inside(regions)}
        return id(target) not in gone and (not around & gone or bool(around & stay))

    return [(target, rule) for target, rule in chosen if stays(target)]


def check_free(chosen: Chosen, targets: list[Target]) -> None:
    """Refuse what cannot be done.

    Raises:
        ValueError: a module cannot be a region, or cannot be kept by one.
    """
    for module in targets[0].chain if targets else ():
        if isinstance(module, DataParallel) and len(module.device_ids) > 1:
            message = (
                f"DataParallel over {len(module.device_ids)} devices cannot have regions: its replicas would run the "
                "regions of the original modules.\n"
                "Use torch.nn.parallel.DistributedDataParallel, or one device"
            )
            raise ValueError(message)
    for target in regions_in(chosen):
        why = target.refusal
        if why is None and stand_in_of(target.module) is not None:
            why = (
                "it already is one, from an earlier recollect.apply or fit.\n"
                "Call recollect.remove(model), or remove() on what that call returned, and apply again"
            )
        if why is not None:
            message = f"module '{target.name}' ({type(target.module).__name__}) cannot be made a region: {why}"
            raise ValueError(message)
    compiled = by_name(target for target in regions_in(chosen) if target.is_compiled)
    earlier = by_name(target for target in targets if stand_in_of(target.module) is not None)
    for target, rule in chosen:
        if rule.acts:
            continue
        for region, path in target.inside(compiled):
            message = (
                f"module '{path}' of '{region.name}' cannot be kept: '{region.name}' is compiled, so its "
                "submodules are not called one by one.\n"
                "Apply the rules before torch.compile, or leave this rule out"
            )
            raise ValueError(message)
        for region, path in target.inside(earlier):
            message = (
                f"module '{path}' of '{region.name}' cannot be kept: an earlier recollect.apply has made "
                f"'{region.name}' a region.\n"
                "Remove that (recollect.remove(model)), and pass both sets of rules in one call"
            )
            raise ValueError(message)


def check_sendable(chosen: Chosen) -> None:
    """Refuse to offload what cannot be.

    Raises:
        ValueError: a module cannot be offloaded.
    """
    for target, rule in chosen:
        if rule.away is None:
            continue
        why = target.refusal
        if why is None and sent_forward_of(target.module) is not None:
            why = "an earlier recollect.apply offloads it already.\nCall recollect.remove(model) first"
        if why is not None:
            message = f"module '{target.name}' ({type(target.module).__name__}) cannot be offloaded: {why}"
            raise ValueError(message)


def find_saved(chosen: Chosen) -> dict[int, list[str]]:
    """For each region, by its id, the paths of the modules in it that are to be kept, as seen from there."""
    regions = by_name(regions_in(chosen))
    saved: dict[int, list[str]] = {}
    for target, rule in chosen:
        if not rule.acts:
            for region, path in target.inside(regions):
                saved.setdefault(id(region), []).append(path)
    return saved


def find_sent(chosen: Chosen) -> list[SentForward]:
    """Entries for the modules whose values are sent, and for those inside of them whose values are to stay."""
    sent = by_name(target for target, rule in chosen if rule.away is not None)
    regions = by_name(regions_in(chosen))
    entries: list[SentForward] = []
    for target, rule in chosen:
        if rule.away is not None:
            entries.append(SentForward(target.module, target.name, rule.away))
        elif not rule.acts and is_in(target, sent) and not is_in(target, regions):
            entries.append(SentForward(target.module, target.name, Staying()))
    return entries


def find_passing(chosen: Chosen, targets: Iterable[Target]) -> list[SentForward]:
    """Entries for modules at whose end an offload lets go of what has left: regions that send nothing, other blocks.

    For plans, which have one offload, and count on it: see `recollect._plan.passing`.
    """
    away = find_away(chosen)
    if not away:
        return []
    known = {"", *(target.name for target, _ in chosen)}
    beside = {target.name.rpartition(".")[0] for target, rule in chosen if rule.sends}
    regions = (target for target, rule in chosen if not rule.sends)
    blocks = (
        target
        for target in targets
        if target.name not in known
        and target.name.rpartition(".")[0] in beside
        and target.is_called
        and target.refusal is None
    )
    return [SentForward(target.module, target.name, Passing(away[0])) for target in (*regions, *blocks)]


def find_away(chosen: Chosen) -> list[Offload]:
    """What the rules send values with, each once."""
    away = [rule.away for _, rule in chosen if rule.away is not None]
    away += [
        rule.choices.elsewhere.offload()
        for _, rule in chosen
        if rule.choices is not None and rule.choices.elsewhere is not None
    ]
    return list({one.hooks: one for one in away}.values())


def is_in(target: Target, others: dict[str, Target]) -> bool:
    return next(target.inside(others), None) is not None


def keeping(choices: Choices, paths: list[str]) -> Choices:
    if not paths:
        return choices
    kept = save_modules(*map(_as_pattern, dict.fromkeys(paths)))
    return replace(choices, policy=kept if choices.policy is None else first_match(kept, choices.policy))


def share_policies(regions: list[Choices]) -> list[Choices]:
    """The same, with one object for policies that are equal: compiled code is found again for that object alone."""
    known: list[Policy] = []
    shared = []
    for choices in regions:
        policy = choices.policy
        if policy is not None:
            policy = next((one for one in known if one == policy), policy)
            known.append(policy)
        shared.append(replace(choices, policy=policy))
    return shared


def _as_pattern(path: str) -> str:
    """A pattern that matches this path alone."""
    return f"re:{re.escape(path)}" if re.search(r"[*?\[\]]", path) else path
