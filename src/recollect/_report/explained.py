"""What policies decided, as data that prints as tables; `recollect.explain` fills it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from recollect._core.decisions import Decision
from recollect._core.units import count_noun, format_bytes

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
    is_by_default: bool = False
    """Whether it is kept although no rule says so: routing results, collectives."""

    @property
    def is_kept(self) -> bool:
        """Whether recomputation is given what it gave."""
        return self.decision is not Decision.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedCall:
    """What happens in a region when it is called in one way: with these shapes and flags."""

    arguments: str
    """In words, as far as it matters: ``float32[8, 16], True``."""
    sites: tuple[ExplainedSite, ...]
    """Blocks that are kept whole, then operators in the order in which they ran; not those that can only be run again:
    views, writes in place."""
    way: str
    """How it is recomputed, in words; empty if nothing is."""
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
    """What was decided; printed, it is a table for each region, identical ones together."""

    regions: tuple[ExplainedRegion, ...]
    note: str = ""
    """What to say where there are none."""

    def __str__(self) -> str:
        """The tables."""
        return _format(self)

    def __repr__(self) -> str:
        return _format(self)


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
    # Identical regions have the same kinds of call, but not in the same order.
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
        return _wrap(f"{len(places)} identical regions: {', '.join(shown).replace(', ..., ', ' ... ')}")
    if len(names) > 1:
        return _wrap(f"{len(names)} identical regions")
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
        verb = "recomputed" if not site.is_kept else "offloaded" if site.decision is Decision.OFFLOAD else "kept"
        verb = f"{verb} whole" if site.is_block else verb
        joint = " " if site.is_by_default else ", " if site.by == "no rule" else " by "
        found.setdefault(f"{verb}{joint}{site.by}", []).append(column)
    return found


def _format_run(run: list[Column]) -> tuple[str, str, str, str]:
    """Bytes, matches, operator and place of sites that follow each other; each in all identical regions."""
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
        lines.append(f"kept {blocks} whole: {_size(call.blocks)} of results, plus what they save themselves")
    lines.append(_format_sum(call))
    away = [site for site in call.kept if site.decision is Decision.OFFLOAD]
    if away:
        lines.append(f"of these offloaded: {_values(away)}, {_size(away)}")
    default = [site for site in call.kept if site.is_by_default]
    if default:
        lines.append(f"of these kept by default: {_values(default)}, {_size(default)}")
    if regions > 1:
        kept, again = _size(call.kept, regions), _size(call.recomputed, regions)
        lines.append(f"in all {regions} regions: kept {kept}; recomputed {again}")
    if not call.way:
        return [*lines, "nothing is recomputed: autograd holds what it would hold without the region"]
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
