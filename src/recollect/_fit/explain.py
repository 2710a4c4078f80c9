"""What a policy decided in a region or a model, site by site: read off what the engine has noted."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from recollect._apply.function import name_of
from recollect._core.decisions import Decision
from recollect._core.operators import operator_of
from recollect._core.units import count_noun, format_bytes
from recollect._policy.judging import BY_DEFAULT
from recollect._recompute.region import Region
from recollect._selective.ledger import Ledger, Line
from recollect._selective.matches import count_matches
from recollect._selective.notes import Notes, all_notes, notes_of
from recollect._selective.plan import Plan
from recollect._selective.region import SelectiveRegion

_WIDTH = 100
_WIDEST_WHAT = 56
_MOST_PATHS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedSite:
    """One call of an operator, or a block that is kept whole, and what becomes of what it gives."""

    what: str
    """The operator, or the block in words: ``module 'attn'``."""
    decision: Decision
    by: str
    """The rule that decided."""
    module: str
    """Path of the module that calls it, seen from the region's own."""
    line: str
    """Where that is written: ``model.py:41``."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors it gives; none for a block."""
    dtypes: tuple[str, ...]
    """Of the same."""
    bytes: int
    """Of all that it gives at one call."""
    matched: int
    """How often the decision was carried out."""
    is_block: bool

    @property
    def is_kept(self) -> bool:
        """Whether recomputation is given what it gave."""
        return self.decision is Decision.SAVE

    @property
    def is_by_default(self) -> bool:
        """Whether it is kept although no rule says so: routing results, collectives."""
        return self.by.startswith(BY_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedCall:
    """What happens in a region when it is called in one way: with these shapes and flags."""

    arguments: str
    """In words, as far as it matters: ``float32[8, 16], True``."""
    sites: tuple[ExplainedSite, ...]
    """Blocks that are kept whole, then operators in the order in which they ran; not those that can only be run again:
    views, writes in place."""
    way: str
    """How it is recomputed, in words."""
    replayed_from: tuple[int, int] | None
    """If it is replayed: how many kept results that starts from, and their bytes. The others are let go."""

    @property
    def calls(self) -> int | None:
        """How often it was called; None if all that it runs is in blocks that are kept whole."""
        return max((site.matched for site in self.sites if not site.is_block), default=None)

    @property
    def kept(self) -> list[ExplainedSite]:
        """The operators whose results are kept."""
        return [site for site in self.sites if site.is_kept and not site.is_block]

    @property
    def recomputed(self) -> list[ExplainedSite]:
        """The operators that are run again where backward needs them."""
        return [site for site in self.sites if not site.is_kept]

    @property
    def blocks(self) -> list[ExplainedSite]:
        """The modules, `recollect.region` blocks and Functions that are kept whole."""
        return [site for site in self.sites if site.is_block]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRegion:
    """A region under one policy."""

    name: str
    paths: tuple[str, ...]
    """Where it is in the model that was asked about; empty for that itself, and for a function."""
    policy: str
    calls: tuple[ExplainedCall, ...]
    """One for each kind of call, the most frequent first."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """What was decided; printed, it is a table for each region, those that are alike together."""

    regions: tuple[ExplainedRegion, ...]
    note: str = ""
    """What to say where there are none."""

    def __str__(self) -> str:
        """The tables."""
        return _format(self)

    def __repr__(self) -> str:
        return _format(self)


def explain(target: Callable[..., Any]) -> Explanation:
    """Say what a policy decided: which values are kept and which recomputed, by which rule, their bytes, how often.

    It tells of calls that were made; run a step first. Operators that can only be run again (views, writes in place)
    are left out.

    Args:
        target: a region, as `checkpoint` returned it; the module or function it was made of, under whatever policies
            it ran; or a model, for all the regions in it.

    Returns:
        An object that prints as a table, and that has `regions`, each with its `calls`, each with its `sites`.

    Raises:
        ValueError: nothing of it ran under a policy.
        TypeError: it can be no region.

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
    if not callable(target):
        message = f"recollect.explain expects a region, a function or a module, not {type(target).__name__} {target!r}"
        raise TypeError(message)
    region = _region_of(target)
    if region is not None:
        return _explain_region(region)
    found = _find_in_module(target) if isinstance(target, nn.Module) else _find_in_function(target)
    regions = [_explain_notes(notes, paths) for notes, paths in found]
    ran = tuple(region for region in regions if region.calls)
    if ran:
        return Explanation(regions=ran)
    if regions:
        return Explanation(regions=(), note=_describe_not_run(regions[0].name, regions[0].policy))
    name = name_of(target)
    message = (
        f"nothing of {name} ran as a region under a policy.\n"
        f"Make it one by recollect.checkpoint({name}, policy=...), run a forward with grad mode on, then ask again."
    )
    raise ValueError(message)


def regions_of(model: nn.Module) -> list[ExplainedRegion]:
    """The regions of a model that ran under a policy."""
    explained = (_explain_notes(notes, paths) for notes, paths in _find_in_module(model))
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
    found = (_explain_notes(notes, ()) for notes in _notes_of(region))
    ran = tuple(explained for explained in found if explained.calls)
    return Explanation(regions=ran, note="" if ran else _describe_not_run(region.name, repr(region.policy)))


def _notes_of(region: SelectiveRegion) -> list[Notes]:
    return [one for one in notes_of(region.fn) if one.region == region.name and one.given == region.policy]


def _describe_not_run(name: str, policy: str) -> str:
    return f"region '{name}' has not run under {policy} yet"


Found = list[tuple[Notes, tuple[str, ...]]]


def _find_in_function(fn: Callable[..., Any]) -> Found:
    if hasattr(fn, "__wrapped__"):
        return _find_in_function(fn.__wrapped__)
    notes = notes_of(fn)
    if not hasattr(fn, "__code__"):  # builtins, partials and other objects share the notes of their class
        notes = [one for one in notes if one.region == name_of(fn)]
    return [(one, ()) for one in notes]


def _find_in_module(model: nn.Module) -> Found:
    """Regions made of its modules or of their methods, and of functions inside that use one of them."""
    paths: defaultdict[Notes, list[str]] = defaultdict(list)
    loose = all_notes()
    for path, module in model.named_modules():
        decorated = [_region_of(part) for part in _methods_of(type(module))]
        noted = [one for region in decorated if isinstance(region, SelectiveRegion) for one in _notes_of(region)]
        noted += notes_of(module)
        noted += [one for one in loose if one.is_about([module])]
        for one in dict.fromkeys(noted):
            paths[one].append(path)
    return [(one, tuple(where)) for one, where in paths.items()]


def _methods_of(kind: type[nn.Module]) -> list[Any]:
    """What a module's class, and those it is made from, define."""
    return [part for base in kind.__mro__ if base not in nn.Module.__mro__ for part in vars(base).values()]


# Reading


def _explain_notes(notes: Notes, paths: tuple[str, ...]) -> ExplainedRegion:
    calls = [
        _explain_ledger(kind, ledger)
        for kind, ledger in list(notes.ledgers.items())
        if ledger.is_learned or ledger.lines or ledger.blocks
    ]
    calls.sort(key=lambda call: -(call.calls or 0))
    return ExplainedRegion(name=notes.region, paths=paths, policy=repr(notes.given), calls=tuple(calls))


def _explain_ledger(kind: Any, ledger: Ledger) -> ExplainedCall:
    lines = [line for line in ledger.lines if line.is_kept or operator_of(line.key).can_be_kept]
    blocks = [_explain_line(line, line.matched, is_block=True) for line in list(ledger.blocks.values())]
    counts = [count_matches(ledger, line) for line in lines]
    ops = [_explain_line(line, count, is_block=False) for line, count in zip(lines, counts, strict=True)]
    return ExplainedCall(
        arguments=_describe_kind(kind),
        sites=(*blocks, *ops),
        way=_describe_way(ledger),
        replayed_from=None if ledger.plan is None else _count_held(ledger.plan),
    )


def _explain_line(line: Line, matched: int, *, is_block: bool) -> ExplainedSite:
    sites = [site for site in line.sites if site.dtype]  # the others are no tensors
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
    )


def _describe_kind(kind: Any) -> str:
    is_training, values = kind
    words = [_describe_value(value) for value in values]
    return ", ".join([*words, "in evaluation mode"] if is_training is False else words)


def _describe_value(value: Any) -> str:
    if isinstance(value, tuple):
        shape, dtype = value
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return value.__name__ if isinstance(value, type) else repr(value)


def _describe_way(ledger: Ledger) -> str:
    if ledger.plan is not None:
        return "by replaying what backward asks for"
    if ledger.keeps_ops:
        why = f": {ledger.why_not_taped}" if ledger.why_not_taped else ""
        return f"by running the function again under a dispatch mode{why}"
    way = "by running the function again" + (" without the blocks that are kept" if ledger.blocks else "")
    return f"{way}, which gathers parameters" if ledger.gathers else way


def _count_held(plan: Plan) -> tuple[int, int]:
    """How many results of kept calls a replay starts from, and their bytes."""
    held = [
        (call.shapes, call.dtype) if call.is_single else call.shapes[place]
        for call in plan.calls
        for place in call.kept
    ]
    return len(held), sum(shape.numel() * dtype.itemsize for shape, dtype in held)


# Writing


def _format(explanation: Explanation) -> str:
    groups: dict[Any, list[ExplainedRegion]] = {}
    for region in explanation.regions:
        groups.setdefault(_likeness(region), []).append(region)
    return "\n\n".join("\n".join(_format_group(group)) for group in groups.values()) or explanation.note


def _likeness(region: ExplainedRegion) -> Any:
    """What regions have in common that are shown together: all but names, places in the model and counts."""
    return region.policy, frozenset(map(_likeness_of_call, region.calls))


def _likeness_of_call(call: ExplainedCall) -> Any:
    return call.arguments, tuple(map(_likeness_of_site, call.sites)), call.way


def _likeness_of_site(site: ExplainedSite) -> Any:
    return site.what, site.decision, site.by, site.module, site.line, site.shapes, site.dtypes, site.bytes


def _format_group(group: list[ExplainedRegion]) -> list[str]:
    first = group[0]
    # Alike regions have the same kinds of call, but not in the same order.
    called = [{_likeness_of_call(call): call for call in region.calls} for region in group]
    main, *others = first.calls
    alike = [calls[_likeness_of_call(main)] for calls in called]
    paths = [path for region in group for path in region.paths]
    count = _format_counts(call.calls for call in alike)
    lines = [
        *_wrap(f"region '{first.name}' under {first.policy}" + (f", called {_times(count)}" if count else "")),
        *_format_paths([region.name for region in group], paths),
        *([f"called with {main.arguments}"] if others else []),
        *_format_table(alike),
        *_format_sums(main, len(group)),
    ]
    for other in others:
        count = _format_counts(calls[_likeness_of_call(other)].calls for calls in called)
        times = f", {_times(count)}" if count else ""
        lines += _wrap(f"called with {other.arguments}{times}: {_format_sum(other)}")
    return lines


def _times(count: str) -> str:
    return f"{count} time{'' if count == '1' else 's'}"


def _format_paths(names: list[str], paths: list[str]) -> list[str]:
    places = [path or "the model itself" for path in paths]
    shown = places if len(places) <= _MOST_PATHS else [*places[:2], "...", places[-1]]
    if len(places) > 1:
        return _wrap(f"{len(places)} regions alike: {', '.join(shown).replace(', ..., ', ' ... ')}")
    if len(names) > 1:
        return _wrap(f"{len(names)} regions alike")
    return [f"at module '{paths[0]}'"] if any(paths) else []


def _format_table(alike: Sequence[ExplainedCall]) -> list[str]:
    """One line for each run of equal sites, under the rules that decided."""
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    sites = sorted(zip(*(call.sites for call in alike), strict=True), key=lambda column: not column[0].is_kept)
    for title, columns in _by_title(sites).items():
        for _, run in groupby(columns, key=lambda column: (column[0].what, column[0].module)):
            sections.setdefault(title, []).append(_format_run(list(run)))
    if not sections:
        return []
    rows = [row for section in sections.values() for row in section]
    size = max(len(row[0]) for row in rows)
    what = min(max(len(row[2]) for row in rows), _WIDEST_WHAT)
    lines = [f"{'bytes':>{size + 1}}  matched  {'what':{what}}  where"]
    for title, section in sections.items():
        lines += _wrap(title)
        for size_text, matched, name, where in section:
            start = f" {size_text:>{size}}  {matched:>7}  {_clip(name, what):{what}}  "
            lines.append(f"{start}{_clip(where, _WIDTH - len(start))}".rstrip())
    return lines


Column = tuple[ExplainedSite, ...]


def _by_title(columns: Iterable[Column]) -> dict[str, list[Column]]:
    found: dict[str, list[Column]] = {}
    for column in columns:
        site = column[0]
        verb = "kept whole" if site.is_block else "kept" if site.is_kept else "recomputed"
        joint = " " if site.is_by_default else ", " if site.by == "no rule" else " by "
        found.setdefault(f"{verb}{joint}{site.by}", []).append(column)
    return found


def _format_run(run: list[Column]) -> tuple[str, str, str, str]:
    """Bytes, matches, operator and place of sites that follow each other; each in all of the regions that are alike."""
    sites = [column[0] for column in run]
    matched = _format_counts(site.matched for column in run for site in column)
    number = f" x{len(sites)}" if len(sites) > 1 else ""
    where = [sites[0].module, _format_lines([site.line for site in sites])]
    size = format_bytes(sum(site.bytes for site in sites))
    return size, matched, f"{sites[0].what}{number}", ", ".join(filter(None, where))


def _format_lines(lines: list[str]) -> str:
    """``model.py:41``, ``model.py:41-43``."""
    different = list(dict.fromkeys(lines))
    if len(different) == 1:
        return different[0]
    files = {line.rpartition(":")[0] for line in different}
    numbers = [line.rpartition(":")[2] for line in different]
    if len(files) == 1 and all(number.isdigit() for number in numbers):
        return f"{files.pop()}:{min(map(int, numbers))}-{max(map(int, numbers))}"
    return f"{different[0]} ..."


def _format_counts(counts: Iterable[int | None]) -> str:
    known = [count for count in counts if count is not None]
    if not known:
        return ""
    return f"{min(known)}" if min(known) == max(known) else f"{min(known)}-{max(known)}"


def _format_sums(call: ExplainedCall, regions: int) -> list[str]:
    lines = []
    if call.blocks:
        blocks = count_noun(len(call.blocks), "block")
        lines.append(f"kept {blocks} whole: {_size(call.blocks)} of results, besides what they save themselves")
    lines.append(_format_sum(call))
    default = [site for site in call.kept if site.is_by_default]
    if default:
        lines.append(f"of these kept by default: {_values(default)}, {_size(default)}")
    if regions > 1:
        kept, again = _size(call.kept, regions), _size(call.recomputed, regions)
        lines.append(f"in all {regions} regions: kept {kept}; recomputed {again}")
    held = ""
    if call.replayed_from is not None:
        count, size = call.replayed_from
        held = f", from {count_noun(count, 'kept result')} ({format_bytes(size)})"
    return lines + _wrap(f"recomputed {call.way}{held}")


def _format_sum(call: ExplainedCall) -> str:
    kept, again = call.kept, call.recomputed
    return f"kept {_values(kept)}, {_size(kept)}; recomputed {_values(again)}, {_size(again)}"


def _values(sites: Iterable[ExplainedSite]) -> str:
    return count_noun(sum(len(site.shapes) for site in sites), "value")


def _size(sites: Iterable[ExplainedSite], regions: int = 1) -> str:
    return format_bytes(regions * sum(site.bytes for site in sites))


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ")


def _clip(text: str, width: int) -> str:
    """The end of a text that is too long: it tells operators and paths apart better than the start."""
    return text if len(text) <= width else f"...{text[3 - width :]}"
