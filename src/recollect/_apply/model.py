"""Apply: rules meet a model, whose modules become regions without an edit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, Never

from torch import nn

from recollect._apply.applied import AppliedPlace, describe_effect
from recollect._apply.caches import describe_twice, switches_for
from recollect._apply.choosing import (
    check_free,
    check_sendable,
    choose_blocks,
    find_away,
    find_passing,
    find_saved,
    find_sent,
    is_in,
    keeping,
    match_rules,
    regions_in,
    share_policies,
    thin_out,
)
from recollect._apply.handle import Applied
from recollect._apply.instance_forward import entries_of
from recollect._apply.levers import make_levers
from recollect._apply.planned import choose_planned
from recollect._apply.rules import (
    PRESETS,
    RegionRule,
    Value,
    describe_away,
    parse_preset,
    parse_rules,
    parse_value,
    read_away,
)
from recollect._apply.stand_in import StandIn
from recollect._apply.targets import Target, by_name, find_targets
from recollect._apply.watches import end_watches
from recollect._core.argument_text import describe_argument
from recollect._core.decisions import Decision
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.spelling import options_of, refuse_unknown
from recollect._core.units import count_noun
from recollect._offload.offload import Offload
from recollect._policy.base import PolicyLike

_log = logging.getLogger("recollect")

Rules = Mapping[Any, Value] | str | PolicyLike | Offload | Plan  # keys are `Key`s; a mapping is not covariant in them


def apply(
    model: nn.Module,
    rules: Rules | None = None,
    *,
    policy: PolicyLike | str | None = None,
    every: int | None = None,
    first: int | None = None,
    **unknown: Never,
) -> Applied:
    """Turn modules of a model into regions, chosen by name, class or predicate, without editing the model.

    A region drops its activations in forward and recomputes them when backward asks. Names, classes, state_dict, hooks
    and results of the model stay the same. A deep copy of the model has the same regions; a shallow copy or a pickled
    model is plain. You can call `apply` before or after DDP, FSDP, freezing or torch.compile.

    Args:
        model: any module; it is changed in place.
        rules: None recomputes the model's repeated blocks. A decision, a policy, ``"full"``, ``"selective"`` (keeps
            attention, every second matrix product and convolutions; only some convolutions where there are no norms) or
            ``"every:2"`` says what to do with these blocks.
            A mapping names the modules itself; the first key that matches decides. A key is a pattern over names
            (``*`` stays within one dotted part, ``**`` crosses them; ``re:`` and a regular expression), a class or a
            tuple of classes, or a function of the module (or of its name and the module). A value is a `Decision`, a
            policy, ``"full"``, ``"selective"``, a mapping of `checkpoint` options, or a `recollect.offload`
            (`Decision.OFFLOAD` means the default one). A saved module inside a recomputed one is not run again.
            A plan from `recollect.plan` decides everything.
        policy: what the model's repeated blocks keep, written as for `checkpoint`; use it instead of `rules`.
        every: make only every n-th matching module a region, counting the outermost ones in the model's order: 2 takes
            the first, third and so on.
        first: make only the first n of them regions.
        unknown: there are no other options; torch's are refused with what to write instead.

    Returns:
        A handle that prints what was applied where; its ``remove`` restores the model.

    Raises:
        ValueError: a rule matches nothing (the nearest names are shown), a module is a region already, a rule has an
            invalid value, or a plan was made for another model.
        TypeError: the model is not a module, a rule has the wrong type, or an option is unknown.

    >>> import torch, recollect
    >>> from recollect import Decision
    >>> from torch.nn import Linear, Sequential, TransformerEncoderLayer as Layer
    >>> layers = [Layer(16, 2, batch_first=True) for _ in range(3)]
    >>> model = Sequential(Linear(4, 16), *layers)
    >>> handle = recollect.apply(model)
    >>> handle
    recollect.apply: 3 regions in Sequential
    module  class                    what       rule
    1-3     TransformerEncoderLayer  recompute  repeated blocks
    >>> model(torch.ones(1, 5, 4)).sum().backward()
    >>> handle.remove()

    Rules compose: here each layer is recomputed, except its attention.

    >>> with recollect.apply(model, {Layer: Decision.RECOMPUTE, "*.self_attn": Decision.SAVE}):
    ...     model(torch.ones(1, 5, 4)).sum().backward()

    A pattern that matches nothing is refused:

    >>> recollect.apply(model, {"layers.*": Decision.RECOMPUTE})
    Traceback (most recent call last):
    ...
    ValueError: pattern 'layers.*' matches no module of Sequential; did you mean '*'...
    """
    if not isinstance(model, nn.Module):
        hint = ": pass an instance" if isinstance(model, type) else ""
        message = f"recollect.apply expects a torch.nn.Module first, not {describe_argument(model)}{hint}"
        raise TypeError(message)
    if unknown:
        otherwise = "it takes 'rules', 'policy', 'every' and 'first'; give other options to modules, as in "
        otherwise += "{'layers.*': {'check': 'values'}}"
        refuse_unknown("recollect.apply", unknown, options_of(apply), otherwise)
    rules = _join_policy(rules, policy)
    every, first = _check_count("every", every), _check_count("first", first)
    targets = find_targets(model)
    if isinstance(rules, Plan):
        chosen = choose_planned(model, targets, rules, every=every, first=first)
    elif isinstance(rules, Mapping):
        chosen = match_rules(model, targets, parse_rules(rules))
    else:
        rule, preset = _parse_for_blocks(rules)
        if preset is not None and every is not None:
            message = f"rules={rules!r} and every={every} both choose how many blocks to recompute; pass only one"
            raise ValueError(message)
        every = every or preset
        chosen = choose_blocks(model, targets, rule)
    chosen = thin_out(chosen, every or 1, first)
    check_free(chosen, targets)
    check_sendable(chosen)
    saved, regions = find_saved(chosen), by_name(regions_in(chosen))
    made = [(target, rule.choices) for target, rule in chosen if rule.choices is not None]
    suited = [keeping(choices.suited(target.module), saved.get(id(target), [])) for target, choices in made]
    stand_ins = [
        StandIn(target.module, target.name, choices)
        for (target, _), choices in zip(made, share_policies(suited), strict=True)
    ]
    sent = by_name(target for target, rule in chosen if rule.away is not None)
    _let_last_report(stand_ins, model)
    handle = Applied(model, [_place(target, rule, regions, sent) for target, rule in chosen])
    for lever in make_levers(targets, rules.levers) if isinstance(rules, Plan) else ():
        handle._put(lever)  # noqa: SLF001
    for stand_in in stand_ins:
        handle._put(stand_in)  # noqa: SLF001
    passing = find_passing(chosen, targets) if isinstance(rules, Plan) else []
    for entry in (*passing, *find_sent(chosen)):
        handle._put(entry)  # noqa: SLF001
    handle._away = find_away(chosen)  # noqa: SLF001
    _put_switches(handle, model, [target.module for target in regions_in(chosen)])
    if isinstance(rules, Plan) and (told := rules.forecast) is not None:
        found = (told.peak_bytes, told.plain_peak_bytes, told.step_s, told.plain_step_s)
        handle._effect = describe_effect(*found, how="as planned")  # noqa: SLF001
    _log.info("%s", handle)
    return handle


def _put_switches(handle: Applied, model: nn.Module, regions: list[nn.Module]) -> None:
    """Keep models of Transformers from filling a cache while they train, and warn of recomputing twice."""
    twice = describe_twice(model, regions)
    if twice is not None:
        warnings.warn(twice, UserWarning, stacklevel=3)
    switches = list(switches_for(model, regions))
    for switch in switches:
        handle._put(switch)  # noqa: SLF001
    if switches:
        note = f"{switches[0].name} does not fill a key/value cache in training; generate() still does."
        handle._notes.append(note)  # noqa: SLF001


def remove(model: nn.Module) -> None:
    """Remove everything that `apply` and `fit` have put into a model and its parts, whoever holds the handles.

    Use it for models with regions but no handle, such as deep copies. If nothing was applied, nothing happens.

    >>> import copy, torch, recollect
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    >>> handle = recollect.apply(model, {"0": recollect.Decision.RECOMPUTE})
    >>> twin = copy.deepcopy(model)
    >>> recollect.remove(twin)
    """
    if not isinstance(model, nn.Module):
        message = f"recollect.remove expects a torch.nn.Module, not {describe_argument(model)}"
        raise TypeError(message)
    end_watches(model)
    for module in model.modules():
        for entry in list(entries_of(module)):
            entry.take_away()


def check_request(
    rules: Rules | None, *, policy: PolicyLike | str | None, every: int | None, first: int | None
) -> None:
    """Refuse what `apply` would refuse for any model, for those who will apply it later.

    Raises:
        ValueError: an option has an invalid value.
        TypeError: it has the wrong type.
    """
    rules = _join_policy(rules, policy)
    _check_count("every", every)
    _check_count("first", first)
    if isinstance(rules, Mapping):
        parse_rules(rules)
    elif not isinstance(rules, Plan):
        _parse_for_blocks(rules)


def _join_policy(rules: Rules | None, policy: PolicyLike | str | None) -> Rules | None:
    """The one of two ways to say what happens to repeated blocks that was taken.

    Raises:
        ValueError: both were, or rules that already say what is kept where.
    """
    if policy is None or rules is None:
        return rules if policy is None else policy
    if isinstance(rules, str) and rules.startswith("every:"):
        message = (
            f"rules={rules!r} cannot be combined with policy=: write every={rules.removeprefix('every:')}, policy=..."
        )
    elif isinstance(rules, Mapping):
        message = (
            "these rules already say what each module keeps: put the policy there, as in "
            "{'layers.*': policy}, and leave policy= out"
        )
    else:
        message = f"rules={rules!r} and policy={policy!r} both say what the repeated blocks keep; pass only one"
    raise ValueError(message)


def _check_count(option: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        message = f"{option}={value!r}: expected a whole number of at least 1"
        raise ValueError(message)
    return None if value is None else int(value)


def _parse_for_blocks(rules: str | PolicyLike | Offload | None) -> tuple[RegionRule, int | None]:
    """What to do with repeated blocks, as a rule that matches whatever was found."""
    every = None
    value: Value = Decision.RECOMPUTE if rules is None or isinstance(rules, str) else rules
    if isinstance(rules, str):
        value, every = parse_preset(rules)
    elif isinstance(value, Profile):
        message = "rules: this is a profile. Make a plan from it: recollect.plan(profile, budget=...)"
        raise TypeError(message)
    elif not callable(value) and not isinstance(value, (Decision, Offload)):
        message = (
            f"rules: expected one of {', '.join(map(repr, PRESETS))}, a recollect.Decision, a policy, "
            "or a mapping from name patterns, classes or predicates to what to do; not "
            f"{describe_argument(rules)}"
        )
        raise TypeError(message)
    away = read_away(value)
    plain: Any = value
    choices, what = parse_value(plain) if away is None else (None, describe_away(away))
    text = "repeated blocks"
    return RegionRule(matches=lambda name, module: True, choices=choices, text=text, what=what, away=away), every


def _let_last_report(stand_ins: list[StandIn], model: nn.Module) -> None:
    """Of the regions under one ready-made policy the last one tells whether that keeps nothing: then all were asked."""
    last = {id(tally): (stand_in, tally) for stand_in in stand_ins if (tally := stand_in.choices.tally) is not None}
    for stand_in, tally in last.values():
        count = sum(other.choices.tally is tally for other in stand_ins)
        stand_in.reports = (tally, f"{count_noun(count, 'region')} of {type(model).__name__}")


def _place(target: Target, rule: RegionRule, regions: dict[str, Target], sent: dict[str, Target]) -> AppliedPlace:
    is_region = rule.choices is not None
    is_kept = not rule.acts and (is_in(target, regions) or is_in(target, sent))
    return AppliedPlace(
        name=target.name,
        class_name=type(target.chain[-1]).__name__,
        what=rule.what if rule.acts or is_kept else "left as it is",
        rule=rule.text,
        is_region=is_region,
        is_kept=is_kept,
        is_sent=rule.away is not None,
    )
