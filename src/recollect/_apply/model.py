"""Apply: rules meet a model, whose modules become regions without an edit."""

from __future__ import annotations

import logging
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from weakref import ref

from torch import nn

from recollect._apply.applied import AppliedPlace, describe_effect, describe_places, write_html
from recollect._apply.blocks import find_blocks
from recollect._apply.caches import describe_twice, switches_for
from recollect._apply.instance_forward import InstanceForward, entries_of
from recollect._apply.levers import make_levers
from recollect._apply.options import Choices, refuse_unknown
from recollect._apply.planned import choose_planned
from recollect._apply.rules import (
    PRESETS,
    Rule,
    Value,
    describe_away,
    parse_preset,
    parse_rules,
    parse_value,
    read_away,
)
from recollect._apply.sent import SentForward, sent_forward_of
from recollect._apply.stand_in import StandIn, stand_in_of
from recollect._apply.targets import Target, by_name, describe_unmatched, find_targets
from recollect._core.decisions import Decision
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.units import count_noun, list_some
from recollect._offload.accounts import OffloadReport
from recollect._offload.offload import Offload, Staying
from recollect._policy.base import PolicyLike
from recollect._policy.combine import first_match
from recollect._policy.places import save_modules

_log = logging.getLogger("recollect")

Rules = Mapping[Any, Value] | str | PolicyLike | Offload | Plan  # keys are `Key`s; a mapping is not covariant in them


class Applied:
    """What `apply` did to a model: prints as a table, and can be undone.

    Attributes:
        places: what became of each module that a rule matched, in the model's order.
        is_removed: whether it was undone.
    """

    def __init__(self, model: nn.Module, places: Iterable[AppliedPlace]) -> None:
        self._model = ref(model)
        self._model_name = type(model).__name__
        self.places = tuple(places)
        self._entries: list[InstanceForward] = []
        self._notes: list[str] = []
        self._effect = ""
        self._away: list[Offload] = []
        self.is_removed = False

    def _put(self, entry: InstanceForward) -> None:
        entry.put()
        self._entries.append(entry)

    def report(self) -> OffloadReport:
        """What offloading does in a step: bytes out and back, the share of the copies that was hidden, waiting time.

        Raises:
            ValueError: nothing is offloaded, or rules with several `recollect.offload`: ask each of those.
        """
        if len(self._away) != 1:
            found = "no rule offloads" if not self._away else f"{len(self._away)} offloads are in the rules"
            message = f"{found}; `report` tells of one. Ask the `recollect.offload` that you gave for its own report"
            raise ValueError(message)
        return self._away[0].report()

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it is gone, for a handle does not keep it."""
        return self._model()

    @property
    def has_policy(self) -> bool:
        """Whether some region keeps values by a policy."""
        return any(isinstance(entry, StandIn) and entry.choices.policy is not None for entry in self._entries)

    @property
    def was_taken_away(self) -> bool:
        """Whether `recollect.remove`, or the handle's own `remove`, has undone it."""
        return self.is_removed or (bool(self._entries) and all(entry.is_removed for entry in self._entries))

    def compare(self, before: Profile, after: Profile) -> None:
        """Let the table say what this frees and costs, from profiles of a step without it and with it.

        Args:
            before: of the plain step.
            after: of the same step with what was applied.

        >>> import torch, recollect
        >>> from torch.nn import GELU, Linear, Sequential
        >>> model = Sequential(*(Sequential(Linear(8, 8), GELU()) for _ in range(4)))
        >>> x = torch.randn(512, 8)
        >>> plain = recollect.profile(model, x)
        >>> handle = recollect.apply(model)
        >>> handle.compare(plain, recollect.profile(model, x))
        >>> print(handle)
        recollect.apply: 4 regions in Sequential
        module  class       what       rule
        0-3     Sequential  recompute  repeated blocks
        frees ... KiB of a peak of ... KiB (...%), ..., as profiled
        """
        found = (after.peak_bytes, before.peak_bytes, after.step_s, before.step_s)
        self._effect = describe_effect(*found, how="as profiled")

    def remove(self) -> None:
        """Take everything away: each module is as it was. Copies of the model keep theirs, see `recollect.remove`."""
        while self._entries:
            self._entries.pop().take_away()
        self.is_removed = True

    def __enter__(self) -> Self:
        """Nothing; leaving the block removes what was applied."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        """The table."""
        return "\n".join([self.head, *describe_places(self.places), *self._all_notes()])

    def _all_notes(self) -> list[str]:
        return [*self._notes, self._effect] if self._effect else self._notes

    @property
    def head(self) -> str:
        """What was done, in one line."""
        regions = sum(place.is_region for place in self.places)
        kept = sum(place.is_kept for place in self.places)
        sent = sum(place.is_sent for place in self.places)
        head = f"recollect.apply: {count_noun(regions, 'region')} in {self._model_name}"
        if kept:
            head += f", {count_noun(kept, 'module')} kept"
        if sent:
            head += f", {count_noun(sent, 'module')} offloaded"
        if self.is_removed:
            head += " (removed)"
        return head

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return write_html(self.head, self.places, self._all_notes())


def apply(
    model: nn.Module,
    rules: Rules | None = None,
    *,
    policy: PolicyLike | str | None = None,
    every: int | None = None,
    first: int | None = None,
    **unknown: Any,
) -> Applied:
    """Make modules of a model forget their activations, chosen by name, class or predicate, without editing the model.

    Names, classes, state_dict, hooks and results of the model stay as they are; each matched module's ``forward``
    becomes a region, within the module's hooks. A deep copy of the model has the same regions; a shallow copy and a
    pickled model are plain. It may come before or after DDP, FSDP, freezing or torch.compile.

    Args:
        model: any module; it is changed in place.
        rules: a mapping; the first key that matches a module decides. A key is a pattern over names
            (``*`` stays within one dotted part, ``**`` crosses them; ``re:`` and a regular expression), a class or a
            tuple of classes, or a function of the module (or of its name and it). A value is a `Decision`, a policy,
            ``"full"``, ``"selective"``, a mapping of the options of `checkpoint`, or a `recollect.offload`, of which
            `Decision.OFFLOAD` is the default one. A module that is saved inside one that is recomputed is not run
            again.
            Or, for the model's repeated blocks: a decision, a policy, ``"full"``, ``"selective"`` (attention, every
            second matrix product and convolutions are kept) or ``"every:2"``. None means ``"full"``.
            Or a plan of `recollect.plan`.
        policy: what the model's repeated blocks keep, written as for `checkpoint`; in place of `rules`.
        every: take only every n-th of the regions that the rules give, outermost ones in the model's order: 2 takes
            the first, third and so on.
        first: take only the first n of them.
        unknown: there are no other options; those of torch are refused with what to write instead.

    Returns:
        A handle that prints what was applied where; its `remove` restores the model.

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
    ValueError: pattern 'layers.*' matches no module of Sequential; near that: '*', ...
    """
    if not isinstance(model, nn.Module):
        message = f"recollect.apply expects a torch.nn.Module first, not {type(model).__name__} {reprlib.repr(model)}"
        raise TypeError(message)
    if unknown:
        otherwise = "its options are 'rules', 'policy', 'every', 'first'; others go to modules by name, as in "
        otherwise += "{'layers.*': {'check': 'values'}}"
        refuse_unknown("recollect.apply", unknown, ("rules", "policy", "every", "first"), otherwise)
    rules = _join_policy(rules, policy)
    every, first = _check_count("every", every), _check_count("first", first)
    targets = find_targets(model)
    if isinstance(rules, Plan):
        chosen = choose_planned(model, targets, rules, every=every, first=first)
    elif isinstance(rules, Mapping):
        chosen = _match(model, targets, parse_rules(rules))
    else:
        rule, preset = _parse_for_blocks(rules)
        if preset is not None and every is not None:
            message = f"rules={rules!r} and every={every} both say how many blocks; pass one of them"
            raise ValueError(message)
        every = every or preset
        chosen = _choose_blocks(model, targets, rule)
    chosen = _thin_out(chosen, every or 1, first)
    _check_free(chosen, targets)
    _check_sendable(chosen)
    saved, regions = _find_saved(chosen), by_name(_regions_in(chosen))
    stand_ins = [
        StandIn(target.module, target.name, _keeping(rule.choices, saved.get(id(target), [])))
        for target, rule in chosen
        if rule.choices is not None
    ]
    sent = by_name(target for target, rule in chosen if rule.away is not None)
    _let_last_report(stand_ins, model)
    handle = Applied(model, [_place(target, rule, regions, sent) for target, rule in chosen])
    for lever in make_levers(targets, rules.levers) if isinstance(rules, Plan) else ():
        handle._put(lever)  # noqa: SLF001
    for stand_in in stand_ins:
        handle._put(stand_in)  # noqa: SLF001
    for entry in _find_sent(chosen):
        handle._put(entry)  # noqa: SLF001
    handle._away = _find_away(chosen)  # noqa: SLF001
    _put_switches(handle, model, [target.module for target in _regions_in(chosen)])
    if isinstance(rules, Plan) and (told := rules.forecast) is not None:
        found = (told.peak_bytes, told.plain_peak_bytes, told.step_s, told.plain_step_s)
        handle._effect = describe_effect(*found, how="as planned")  # noqa: SLF001
    _log.info("%s", handle)
    return handle


def _put_switches(handle: Applied, model: nn.Module, regions: list[nn.Module]) -> None:
    """Keep models of Transformers from filling a cache while they train, and from recomputing twice."""
    twice = describe_twice(regions)
    if twice is not None:
        warnings.warn(twice, UserWarning, stacklevel=3)
    switches = list(switches_for(model, regions))
    for switch in switches:
        handle._put(switch)  # noqa: SLF001
    if switches:
        note = f"{switches[0].name} fills no key/value cache while it trains; generate() keeps its own."
        handle._notes.append(note)  # noqa: SLF001


def remove(model: nn.Module) -> None:
    """Take away all that `apply` has put into a model and its parts, whoever holds the handles.

    For models that carry regions without a handle: deep copies. Where nothing was applied, nothing happens.

    >>> import copy, torch, recollect
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    >>> handle = recollect.apply(model, {"0": recollect.Decision.RECOMPUTE})
    >>> twin = copy.deepcopy(model)
    >>> recollect.remove(twin)
    """
    if not isinstance(model, nn.Module):
        message = f"recollect.remove expects a torch.nn.Module, not {type(model).__name__} {reprlib.repr(model)}"
        raise TypeError(message)
    for module in model.modules():
        for entry in list(entries_of(module)):
            entry.take_away()


def _join_policy(rules: Rules | None, policy: PolicyLike | str | None) -> Rules | None:
    """The one of two ways to say what happens to repeated blocks that was taken.

    Raises:
        ValueError: both were, or rules that already say what is kept where.
    """
    if policy is None or rules is None:
        return rules if policy is None else policy
    if isinstance(rules, str) and rules.startswith("every:"):
        message = f"rules={rules!r} and policy=: write every={rules.removeprefix('every:')} and policy="
    elif isinstance(rules, Mapping):
        message = "rules say what each module keeps, so policy= has no meaning: write {'layers.*': policy} there"
    else:
        message = f"rules={rules!r} and policy={policy!r} both say what the repeated blocks keep; pass one of them"
    raise ValueError(message)


Chosen = list[tuple[Target, Rule]]


def _check_count(option: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        message = f"{option}={value!r}: expected a whole number of at least 1"
        raise ValueError(message)
    return None if value is None else int(value)


def _parse_for_blocks(rules: str | PolicyLike | Offload | None) -> tuple[Rule, int | None]:
    """What to do with repeated blocks, as a rule that matches whatever was found."""
    every = None
    value: Value = Decision.RECOMPUTE if rules is None or isinstance(rules, str) else rules
    if isinstance(rules, str):
        value, every = parse_preset(rules)
    elif not callable(value) and not isinstance(value, (Decision, Offload)):
        message = (
            f"rules: expected a mapping from name pattern, class or predicate to what to do, one of "
            f"{', '.join(map(repr, PRESETS))}, a recollect.Decision or a policy; not {type(rules).__name__} {rules!r}"
        )
        raise TypeError(message)
    away = read_away(value)
    plain: Any = value
    choices, what = parse_value(plain) if away is None else (None, describe_away(away))
    return Rule(matches=lambda name, module: True, choices=choices, text="repeated blocks", what=what, away=away), every


def _match(model: nn.Module, targets: list[Target], rules: list[Rule]) -> Chosen:
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
            message = f"rule {rule.text} decides nothing: earlier rules match all of its modules. Put it before them"
            warnings.warn(message, UserWarning, stacklevel=3)
    return chosen


def _is_meant(rule: Rule, target: Target) -> bool:
    return any(rule.matches(name, module) for name in target.names for module in target.chain)


def _describe_no_match(model: nn.Module, targets: list[Target], rule: Rule, lists: list[Target]) -> str:
    if lists:
        names = list_some([f"'{target.name}'" for target in lists])
        inner = f"'{lists[0].name}.*'"
        kind = type(lists[0].chain[-1]).__name__
        return (
            f"rule {rule.text} matches {names} of {type(model).__name__} only: a {kind} is never called itself. "
            f"Its modules are {inner}"
        )
    if rule.pattern is not None:
        return describe_unmatched(rule.pattern, model, targets)
    classes = list(dict.fromkeys(type(target.chain[-1]).__name__ for target in targets if target.is_called))
    return f"rule {rule.text} matches no module of {type(model).__name__}; classes there: {list_some(classes)}"


def _choose_blocks(model: nn.Module, targets: list[Target], rule: Rule) -> Chosen:
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
            f"{type(model).__name__} has no repeated blocks: no ModuleList or Sequential holds several modules of one "
            "class that are more than a layer of torch.\n"
            "Name the modules to recompute: recollect.apply(model, {'name': recollect.Decision.RECOMPUTE}). "
            + (f"Its largest are {near}" if near else "It has no modules inside: use recollect.checkpoint(model)")
        )
        raise ValueError(message)
    return chosen


def _count_parameters(target: Target) -> int:
    return sum(parameter.numel() for parameter in target.chain[-1].parameters())


def _regions_in(chosen: Chosen) -> list[Target]:
    return [target for target, rule in chosen if rule.choices is not None]


def _thin_out(chosen: Chosen, every: int, first: int | None) -> Chosen:
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


def _check_free(chosen: Chosen, targets: list[Target]) -> None:
    """Refuse what cannot be done.

    Raises:
        ValueError: a module can be no region, or cannot be kept by one.
    """
    for target in _regions_in(chosen):
        why = target.refusal
        if why is None and stand_in_of(target.module) is not None:
            why = (
                "it is a region already, by an earlier recollect.apply: remove that one first, with "
                "recollect.remove(model) or handle.remove()"
            )
        if why is not None:
            message = f"module '{target.name}' ({type(target.module).__name__}) cannot be made a region: {why}"
            raise ValueError(message)
    compiled = by_name(target for target in _regions_in(chosen) if target.is_compiled)
    earlier = by_name(target for target in targets if stand_in_of(target.module) is not None)
    for target, rule in chosen:
        if rule.acts:
            continue
        for region, path in target.inside(compiled):
            message = (
                f"module '{path}' of '{region.name}' cannot be kept: '{region.name}' is compiled, and its parts are "
                "not called one by one.\nApply the rules before torch.compile, or leave this one out"
            )
            raise ValueError(message)
        for region, path in target.inside(earlier):
            message = (
                f"module '{path}' of '{region.name}' cannot be kept: '{region.name}' is a region by an earlier "
                "recollect.apply.\nRemove that one (recollect.remove(model)) and pass the rules for both at once"
            )
            raise ValueError(message)


def _check_sendable(chosen: Chosen) -> None:
    """Refuse to offload what cannot be.

    Raises:
        ValueError: a module cannot be offloaded.
    """
    for target, rule in chosen:
        if rule.away is None:
            continue
        why = target.refusal
        if why is None and sent_forward_of(target.module) is not None:
            why = "it is offloaded already, by an earlier recollect.apply: remove that one first (handle.remove())"
        if why is not None:
            message = f"module '{target.name}' ({type(target.module).__name__}) cannot be offloaded: {why}"
            raise ValueError(message)


def _find_saved(chosen: Chosen) -> dict[int, list[str]]:
    """For each region, by its id, the paths of the modules in it that are to be kept, as seen from there."""
    regions = by_name(_regions_in(chosen))
    saved: dict[int, list[str]] = {}
    for target, rule in chosen:
        if not rule.acts:
            for region, path in target.inside(regions):
                saved.setdefault(id(region), []).append(path)
    return saved


def _find_sent(chosen: Chosen) -> list[SentForward]:
    """Entries for the modules whose values are sent, and for those inside of them whose values are to stay."""
    sent = by_name(target for target, rule in chosen if rule.away is not None)
    regions = by_name(_regions_in(chosen))
    entries: list[SentForward] = []
    for target, rule in chosen:
        if rule.away is not None:
            entries.append(SentForward(target.module, target.name, rule.away))
        elif not rule.acts and _is_in(target, sent) and not _is_in(target, regions):
            entries.append(SentForward(target.module, target.name, Staying()))
    return entries


def _find_away(chosen: Chosen) -> list[Offload]:
    """What the rules send values with, each once."""
    away = [rule.away for _, rule in chosen if rule.away is not None]
    away += [
        rule.choices.elsewhere.offload()
        for _, rule in chosen
        if rule.choices is not None and rule.choices.elsewhere is not None
    ]
    return list({one.hooks: one for one in away}.values())


def _is_in(target: Target, others: dict[str, Target]) -> bool:
    return next(target.inside(others), None) is not None


def _keeping(choices: Choices, paths: list[str]) -> Choices:
    if not paths:
        return choices
    kept = save_modules(*map(_as_pattern, dict.fromkeys(paths)))
    return replace(choices, policy=kept if choices.policy is None else first_match(kept, choices.policy))


def _as_pattern(path: str) -> str:
    """A pattern that matches this path alone."""
    return f"re:{re.escape(path)}" if re.search(r"[*?\[\]]", path) else path


def _let_last_report(stand_ins: list[StandIn], model: nn.Module) -> None:
    """Of the regions under one ready-made policy the last one tells whether that keeps nothing: then all were asked."""
    last = {id(tally): (stand_in, tally) for stand_in in stand_ins if (tally := stand_in.choices.tally) is not None}
    for stand_in, tally in last.values():
        count = sum(other.choices.tally is tally for other in stand_ins)
        stand_in.reports = (tally, f"{count_noun(count, 'region')} of {type(model).__name__}")


def _place(target: Target, rule: Rule, regions: dict[str, Target], sent: dict[str, Target]) -> AppliedPlace:
    is_region = rule.choices is not None
    is_kept = not rule.acts and (_is_in(target, regions) or _is_in(target, sent))
    return AppliedPlace(
        name=target.name,
        class_name=type(target.chain[-1]).__name__,
        what=rule.what if rule.acts or is_kept else "left as it is",
        rule=rule.text,
        is_region=is_region,
        is_kept=is_kept,
        is_sent=rule.away is not None,
    )
