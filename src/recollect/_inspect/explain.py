"""What a policy decided in a region or a model, site by site: read off what the engine has noted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from torch import nn

from recollect._apply.function import name_of
from recollect._apply.handle import Applied
from recollect._apply.stand_in import stand_in_of
from recollect._core.argument_text import describe_argument
from recollect._core.operators import operator_of
from recollect._core.units import count_noun
from recollect._policy.judging import BY_DEFAULT
from recollect._recompute.region import Region
from recollect._report.explained import ExplainedCall, ExplainedRegion, ExplainedSite, Explanation
from recollect._selective.decisions import DecisionLine, Decisions
from recollect._selective.knowledge import Knowledge, all_knowledge, knowledge_of
from recollect._selective.plain import keeps_all
from recollect._selective.program import Program
from recollect._selective.region import SelectiveRegion
from recollect._selective.unmatched import count_matches


class HasModel(Protocol):
    """What `recollect.fit` returns."""

    @property
    def model(self) -> nn.Module: ...


def explain(target: Callable[..., Any] | Applied | HasModel) -> Explanation:
    """Say what a policy decided: which values are kept or recomputed, by which rule, how large and how often.

    It describes calls that were made, so run a step first. Operators that can only be run again (views, in-place
    writes) are left out.

    Args:
        target: a region, as `checkpoint` returned it; the module or function that it wraps, under all policies it ran
            with; a model, for all its regions; or what `apply` or `fit` returned.

    Returns:
        An object that prints as a table, and that has `regions`, each with its `calls`, each with its `sites`.

    Raises:
        ValueError: the target is not a region and contains none.
        TypeError: the target cannot be a region.

    >>> import torch, recollect
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Tanh())
    >>> region = recollect.checkpoint(mlp, policy=recollect.policies.save_matmuls, name="mlp")
    >>> recollect.explain(region)
    region 'mlp' has not run under save_matmuls yet
    >>> for _ in range(3):
    ...     region(torch.ones(16, 64)).sum().backward()
    >>> recollect.explain(region)
    region 'mlp' under save_matmuls, called 3 times
         bytes  matched  what                where
    kept by save_matmuls
     16.00 KiB        3  aten.addmm.default  0
      4.00 KiB        3  aten.addmm.default  2
    recomputed, no rule
     16.00 KiB        3  aten.gelu.default   1
      4.00 KiB        3  aten.tanh.default   3
    kept 2 values, 20.00 KiB; recomputed 2 values, 20.00 KiB
    recomputed by replaying what backward asks for, from 2 kept results (20.00 KiB)
    """
    if isinstance(target, Applied):
        return _explain_applied(target)
    if not callable(target):
        if isinstance(model := getattr(target, "model", None), nn.Module):
            return explain(model)
        message = f"recollect.explain expects a region, a function or a module, not {describe_argument(target)}"
        raise TypeError(message)
    region = _region_of(target)
    if region is not None:
        return _explain_region(region)
    found = _find_in_module(target) if isinstance(target, nn.Module) else _find_in_function(target)
    regions = [_explain_knowledge(knowledge, paths) for knowledge, paths in found]
    ran = tuple(region for region in regions if region.calls)
    if ran:
        return Explanation(regions=ran)
    if regions:
        return Explanation(regions=(), note=_describe_not_run(regions[0].name, regions[0].policy))
    name = name_of(target)
    if isinstance(target, nn.Module) and (applied := [entry for entry in map(stand_in_of, target.modules()) if entry]):
        waiting = sum(entry.choices.policy is not None for entry in applied)
        note = f"{name} has {count_noun(waiting, 'region')} under a policy; none has run yet outside of compiled code"
        if not waiting:
            note = f"{name} has {count_noun(len(applied), 'region')} without a policy: all of them are recomputed"
        return Explanation(regions=(), note=note)
    is_model = isinstance(target, nn.Module) and next(target.children(), None) is not None
    how = (
        "Call recollect.apply(model, policy=...)"
        if is_model
        else f"Wrap it in recollect.checkpoint({name}, policy=...)"
    )
    message = (
        f"no part of {name} has run as a region under a policy.\n{how}, run forward with grad mode on, then ask again."
    )
    raise ValueError(message)


def _explain_applied(handle: Applied) -> Explanation:
    model = handle.model
    if model is None:
        message = "the model of this handle has been freed: keep it alive, and call recollect.explain(model)"
        raise ValueError(message)
    if not handle.has_policy:
        return Explanation(regions=(), note=f"{handle.head}: none has a policy, so all of them are recomputed")
    return explain(model)


def regions_of(model: nn.Module) -> list[ExplainedRegion]:
    """The regions of a model that ran under a policy."""
    explained = (_explain_knowledge(knowledge, paths) for knowledge, paths in _find_in_module(model))
    return [region for region in explained if region.calls]


# Finding


def _region_of(fn: Any) -> Region | None:
    """The region behind a function that `checkpoint` returned."""
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # a cell not filled yet
            owner = getattr(cell.cell_contents, "__self__", None)
            if isinstance(owner, Region):
                return owner
    return None


def _explain_region(region: Region) -> Explanation:
    if not isinstance(region, SelectiveRegion):
        return Explanation(regions=(), note=f"region '{region.name}' has no policy: all of it is recomputed")
    found = (_explain_knowledge(knowledge, ()) for knowledge in _knowledge_of(region))
    ran = tuple(explained for explained in found if explained.calls)
    return Explanation(regions=ran, note="" if ran else _describe_not_run(region.name, repr(region.policy)))


def _knowledge_of(region: SelectiveRegion) -> list[Knowledge]:
    return [one for one in knowledge_of(region.fn) if one.region == region.name and one.given == region.policy]


def _describe_not_run(name: str, policy: str) -> str:
    return f"region '{name}' has not run under {policy} yet"


Found = list[tuple[Knowledge, tuple[str, ...]]]


def _find_in_function(fn: Callable[..., Any]) -> Found:
    if hasattr(fn, "__wrapped__"):
        return _find_in_function(fn.__wrapped__)
    knowledge = knowledge_of(fn)
    if not hasattr(fn, "__code__"):  # builtins, partials and other objects share the knowledge of their class
        knowledge = [one for one in knowledge if one.region == name_of(fn)]
    return [(one, ()) for one in knowledge]


def _find_in_module(model: nn.Module) -> Found:
    """Regions made of its modules or of their methods, and of functions inside that use one of them."""
    paths: defaultdict[Knowledge, list[str]] = defaultdict(list)
    loose = all_knowledge()
    for path, module in model.named_modules():
        decorated = [_region_of(part) for part in _methods_of(type(module))]
        noted = [one for region in decorated if isinstance(region, SelectiveRegion) for one in _knowledge_of(region)]
        noted += knowledge_of(module)
        noted += [one for one in loose if one.is_about([module])]
        for one in dict.fromkeys(noted):
            paths[one].append(path)
    return [(one, tuple(where)) for one, where in paths.items()]


def _methods_of(kind: type[nn.Module]) -> list[Any]:
    """What a module's class, and those it is made from, define."""
    return [part for base in kind.__mro__ if base not in nn.Module.__mro__ for part in vars(base).values()]


# Reading


def _explain_knowledge(knowledge: Knowledge, paths: tuple[str, ...]) -> ExplainedRegion:
    calls = [
        _explain_decisions(kind, decisions)
        for kind, decisions in list(knowledge.by_kind.items())
        if decisions.is_learned or decisions.lines or decisions.blocks
    ]
    calls.sort(key=lambda call: -(call.calls or 0))
    return ExplainedRegion(name=knowledge.region, paths=paths, policy=repr(knowledge.given), calls=tuple(calls))


def _explain_decisions(kind: Any, decisions: Decisions) -> ExplainedCall:
    lines = [line for line in decisions.lines if line.is_kept or operator_of(line.key).can_be_kept]
    blocks = [_explain_line(line, line.matched, is_block=True) for line in list(decisions.blocks.values())]
    counts = [count_matches(decisions, line) for line in lines]
    ops = [_explain_line(line, count, is_block=False) for line, count in zip(lines, counts, strict=True)]
    return ExplainedCall(
        arguments=_describe_kind(kind),
        sites=(*blocks, *ops),
        way=_describe_way(decisions),
        replayed_from=None if decisions.program is None else _count_held(decisions.program),
    )


def _explain_line(line: DecisionLine, matched: int, *, is_block: bool) -> ExplainedSite:
    sites = [site for site in line.sites if site.dtype]  # the others are not tensors
    return ExplainedSite(
        what=line.what,
        decision=line.decision,
        by=line.by,
        module=line.place.module if line.place is not None else "",
        line=line.place.line if line.place is not None else "",
        shapes=tuple(site.shape for site in sites),
        dtypes=tuple(site.dtype for site in sites),
        bytes=line.bytes,
        matched=matched,
        is_block=is_block,
        is_by_default=line.by.startswith(BY_DEFAULT),
    )


def _describe_kind(kind: Any) -> str:
    words = [_describe_value(value) for value in kind.words]
    if kind.training is False:
        words.append("in evaluation mode")
    if kind.autocast is not None:
        words.append("under autocast")
    return ", ".join(words)


def _describe_value(value: Any) -> str:
    if isinstance(value, tuple):
        shape, dtype = value
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return value.__name__ if isinstance(value, type) else repr(value)


def _describe_way(decisions: Decisions) -> str:
    if keeps_all(decisions.policy, decisions.region):
        return ""
    if decisions.program is not None:
        return "by replaying what backward asks for"
    if decisions.keeps_ops:
        why = f"; it has no program: {decisions.why_no_program}" if decisions.why_no_program else ""
        how = "under a dispatch mode" if decisions.ops is None else "without the operators that are kept"
        return f"by running the function again {how}{why}"
    way = "by running the function again" + (" without the blocks that are kept" if decisions.blocks else "")
    return f"{way}, which gathers parameters" if decisions.gathers else way


def _count_held(program: Program) -> tuple[int, int]:
    """How many results of kept calls a replay starts from, and their bytes."""
    held = [
        (call.shapes, call.dtype) if call.is_single else call.shapes[place]
        for call in program.calls
        for place in call.kept
    ]
    return len(held), sum(shape.numel() * dtype.itemsize for shape, dtype in held)
