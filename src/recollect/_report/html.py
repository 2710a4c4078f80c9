"""A profile as one page for a browser. No torch here.

What the page shows travels in columns and with each text once; the scripts in `page/` turn it into elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from recollect._core.calls import Category, Phase, Value
from recollect._core.families import Families
from recollect._core.gains import Gain
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._report.answer import Answer, answer
from recollect._report.page_file import write_page
from recollect._report.palette import STACK as _CATEGORIES
from recollect._report.summary import SavedRow, find_peak, list_modules, list_saved, sum_saved
from recollect._report.verdict import judge_allocator, judge_peak

_PHASES = tuple(Phase)

_SCRIPTS = (
    "format.js",
    "step.js",
    "table.js",
    "scales.js",
    "folding.js",
    "answer.js",
    "curves.js",
    "chart.js",
    "overview.js",
    "links.js",
    "timeline.js",
    "treemap.js",
    "comparison.js",
    "picture.js",
    "report.js",
)

Columns = dict[str, list[Any]]


def write_html(profile: Profile, *, against: Profile | None = None, gains: Sequence[Gain] = ()) -> str:
    """The page of a profile, as text to be written to a file in UTF-8.

    Args:
        profile: what it is of.
        against: an earlier profile that it is compared with: the one before, where `profile` is the one after.
        gains: what recomputing modules would free.

    >>> page = write_html(Profile(storages=(), calls=(), name="<script>"))
    >>> page.startswith("<!doctype html>"), "<title>&lt;script&gt;" in page
    (True, True)
    """
    texts, families, found = _Texts(), Families(profile.modules), answer(profile, gains)
    steps = [] if against is None else [_encode(against, texts, with_saved=False)]
    steps.append(_encode(profile, texts, with_saved=True))
    data = {
        "categories": [category.value for category in _CATEGORIES],
        "phases": [phase.value for phase in _PHASES],
        "steps": steps,
        "gains": _encode_gains(gains, families, texts),
        "answer": _encode_answer(found),
        "families": texts.fold([Families(one.modules) for one in (profile, against) if one is not None]),
        "strings": texts.all,
    }
    return write_page(
        "report",
        title=f"{profile.name or 'A training step'}: {format_bytes(find_peak(profile).bytes)} at the peak",
        headline=f"{found.fit} {found.peak}",
        scripts=_SCRIPTS,
        data=data,
    )


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts, each once, known by their places: paths and operators are there thousands of times."""

    all: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def place(self, text: str) -> int:
        if text not in self.places:
            self.places[text] = len(self.all)
            self.all.append(text)
        return self.places[text]

    def fold(self, families: Sequence[Families]) -> list[tuple[int, int]]:
        """The places of paths that stand for several, each with that of its family's name."""
        found = []
        for text in tuple(self.all):
            name = next((name for one in families if (name := one.name(text)) != text), text)
            if name != text:
                found.append((self.places[text], self.place(name)))
        return found

    def column(self, column: Iterable[str]) -> list[int]:
        return [self.place(text) for text in column]


def _encode(profile: Profile, texts: _Texts, *, with_saved: bool) -> dict[str, Any]:
    peak, totals, families = find_peak(profile), sum_saved(profile), Families(profile.modules)
    held = profile.timeline.bytes_by_category(-1)
    return {
        "name": profile.name,
        "device": profile.device,
        "clock": profile.clock.value if profile.clock else "",
        "seconds": profile.step_s,
        "is_dry": profile.is_dry,
        "fixed_bytes": profile.fixed_bytes,
        "capacity_bytes": profile.capacity_bytes,
        "temporary": _CATEGORIES.index(Category.TEMPORARY),
        "library": _CATEGORIES.index(Category.LIBRARY),
        "optimizer": profile.optimizer,
        "torch": profile.torch,
        "verdict": [*judge_peak(peak), *(judge_allocator(entry) for entry in profile.allocators)],
        "notes": list(profile.notes),
        "peak": {
            "bytes": peak.bytes,
            "call": peak.call,
            "sentence": peak.sentence,
            "by_category": [peak.by_category.get(category, 0) for category in _CATEGORIES],
        },
        "held_by_category": [held.get(category, 0) for category in _CATEGORIES],
        "calls": _encode_calls(profile, texts),
        "storages": _encode_storages(profile, texts),
        "modules": _encode_modules(profile, families, texts),
        "saved": _encode_saved(list_saved(profile) if with_saved else [], families, texts),
        "totals_saved": {
            "count": totals.count,
            "bytes": totals.bytes,
            "most_bytes": totals.most_bytes,
            "passes": totals.passes,
        },
        "rules": _encode_rules(profile, texts),
        "transfers": {
            "is_out": [transfer.is_out for transfer in profile.transfers],
            "bytes": [transfer.bytes for transfer in profile.transfers],
            "start": [transfer.start for transfer in profile.transfers],
            "end": [transfer.end for transfer in profile.transfers],
            "tier": texts.column(transfer.tier for transfer in profile.transfers),
        },
    }


def _encode_calls(profile: Profile, texts: _Texts) -> Columns:
    calls = profile.calls
    return {
        "op": texts.column(call.op for call in calls),
        "module": texts.column(call.module for call in calls),
        "source": texts.column(call.source for call in calls),
        "region": texts.column(call.region for call in calls),
        "phase": [_PHASES.index(call.phase) for call in calls],
        "nanoseconds": [None if call.seconds is None else round(call.seconds * 1e9) for call in calls],
        "workspace_bytes": [call.workspace_bytes for call in calls],
    }


def _encode_storages(profile: Profile, texts: _Texts) -> Columns:
    """Those on the device; what is elsewhere does not count, and no part of the page refers to a storage by index."""
    tensors = _find_tensors(profile)
    kept = [index for index, size in enumerate(profile.timeline.sizes) if size]
    spans = [profile.timeline.spans[index] for index in kept]
    storages = [profile.storages[index] for index in kept]
    return {
        "size": [profile.timeline.sizes[index] for index in kept],
        "start": [start for start, _ in spans],
        "end": [end for _, end in spans],
        "category": [_CATEGORIES.index(storage.category) for storage in storages],
        "tensor": texts.column(_write_tensor(tensors[index]) if index in tensors else "" for index in kept),
        "name": texts.column(storage.name for storage in storages),
    }


def _find_tensors(profile: Profile) -> dict[int, Value]:
    """The first tensor that is seen on each storage: what made it, or what is read of it where that was not seen."""
    found: dict[int, Value] = {}
    for call in profile.calls:
        for value in (*call.outputs, *call.inputs):
            if value.dtype or value.shape:
                found.setdefault(value.storage, value)
    return found


def _write_tensor(value: Value | SavedRow) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _encode_modules(profile: Profile, families: Families, texts: _Texts) -> Columns:
    rows = list_modules(profile)
    return {
        "path": texts.column(row.path for row in rows),
        "family": texts.column(families.name(row.path) for row in rows),
        "kind": texts.column(row.kind for row in rows),
        "depth": [row.depth for row in rows],
        "saved_bytes": [row.saved_bytes for row in rows],
        "own_saved_bytes": [row.own_saved_bytes for row in rows],
        "parameter_bytes": [row.parameter_bytes for row in rows],
        "forward_s": [_round(row.forward_s) for row in rows],
        "backward_s": [_round(row.backward_s) for row in rows],
        "recompute_s": [_round(row.recompute_s) for row in rows],
    }


def _encode_saved(rows: Sequence[SavedRow], families: Families, texts: _Texts) -> Columns:
    return {
        "bytes": [row.bytes for row in rows],
        "tensor": texts.column(_write_tensor(row) for row in rows),
        "op": texts.column(row.op for row in rows),
        "module": texts.column(row.module for row in rows),
        "family": texts.column(families.name(row.module) for row in rows),
        "source": texts.column(row.source for row in rows),
        "category": [_CATEGORIES.index(row.category) for row in rows],
        "holders": texts.column(", ".join(dict.fromkeys(row.holders)) for row in rows),
    }


def _encode_rules(profile: Profile, texts: _Texts) -> Columns:
    rules = profile.rules
    return {
        "region": texts.column(entry.region for entry in rules),
        "rule": texts.column(entry.rule for entry in rules),
        "decision": texts.column(entry.decision.value for entry in rules),
        "regions": [entry.regions for entry in rules],
        "values": [entry.values for entry in rules],
        "bytes": [entry.bytes for entry in rules],
    }


def _encode_answer(found: Answer) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "fit": found.fit,
        "suggestions": [{"what": one.what, "gives": one.gives, "code": one.code} for one in found.suggestions],
    }


def _encode_gains(gains: Sequence[Gain], families: Families, texts: _Texts) -> Columns:
    return {
        "path": texts.column(gain.path for gain in gains),
        "family": texts.column(families.name(gain.path) for gain in gains),
        "policy": texts.column(gain.policy for gain in gains),
        "every": [gain.every for gain in gains],
        "kind": texts.column(gain.kind for gain in gains),
        "count": [gain.count for gain in gains],
        "freed_bytes": [gain.freed_bytes for gain in gains],
        "peak_bytes": [gain.peak_bytes for gain in gains],
        "recompute_s": [_round(gain.recompute_s) for gain in gains],
        "recompute_flops": [gain.recompute_flops for gain in gains],
        "price": [gain.price for gain in gains],
    }


def _round(seconds: float | None) -> float | None:
    """To nanoseconds: digits that nobody reads are most of the text of a number."""
    return None if seconds is None else round(seconds, 9)
