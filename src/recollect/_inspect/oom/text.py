"""The report of a step that ran out of memory, as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recollect._core.calls import Phase
from recollect._core.numbers import format_seconds
from recollect._core.units import count_noun, format_bytes
from recollect._inspect.oom.alive import SavedPlace
from recollect._inspect.oom.judged import Judged, Judgement
from recollect._inspect.oom.remedies import Remedy, generalise

if TYPE_CHECKING:
    from recollect._inspect.oom.report import OomReport

_WIDTH = 80
_PHASES = {Phase.OPTIMIZER: "the optimizer's step"}


def format_report(report: OomReport, *, top: int) -> str:
    """All of it; of what is saved only the largest rows."""
    lines = [
        *_format_head(report),
        *_format_alive(report),
        *_format_saved(report, top),
        *_format_remedies(report),
        *_format_notes(report),
    ]
    return "\n".join(lines) + "\n"


def _format_head(report: OomReport) -> Iterator[str]:
    rank = "" if report.rank is None else f" (rank {report.rank})"
    yield from _wrap(f"recollect.on_oom{rank}: out of memory on {report.device} in {describe_place(report)}")
    asked = report.requested_bytes
    numbers = ["memory ran out" if asked is None else f"asked for {format_bytes(asked)}"]
    if report.allocated_bytes is not None:
        of = "" if report.total_bytes is None else f" of {format_bytes(report.total_bytes)}"
        numbers.append(f"{format_bytes(report.allocated_bytes)}{of} were allocated")
    if report.unused_bytes:
        numbers.append(f"{format_bytes(report.unused_bytes)} reserved but fragmented")
    if report.missing_bytes is not None and report.missing_bytes != asked:
        numbers.append(f"missing: {format_bytes(report.missing_bytes)}")
    yield from _wrap("; ".join(numbers), indent=2)
    for line in report.stack:
        yield _cut_end(f"  {line}", _WIDTH)


def describe_place(report: OomReport) -> str:
    """Where memory ran out, in words: ``forward of layers.3.mlp (Linear), model.py:41``."""
    phase = _PHASES.get(report.phase, report.phase.value)
    # In backward the frames say where it was started; the line is that of the forward code whose gradient it was.
    about = "about " if report.phase is Phase.BACKWARD and not report.is_exact and report.kind else ""
    whose = f" of {about}{_describe_module(report.module, report.kind)}" if report.kind else ""
    return f"{phase}{whose}{f', {report.line}' if report.line else ''}"


def _describe_module(path: str, kind: str) -> str:
    return f"{path} ({kind})" if path and path != kind else kind


def _format_alive(report: OomReport) -> Iterator[str]:
    alive = report.alive
    rows = [
        (alive.parameter_bytes, "parameters and buffers"),
        (alive.gradient_bytes, "gradients"),
        (alive.optimizer_bytes, "optimizer state"),
        (alive.saved_bytes, "held for backward"),
        (alive.other_bytes, "other tensors" + _format_others(alive.others)),
    ]
    if report.rest_bytes is not None:
        rows.append((report.rest_bytes, "temporaries, and what Python cannot see"))
    yield f"alive on {report.device}"
    for size, what in rows:
        if size:
            yield from textwrap.wrap(f"{format_bytes(size):>12}  {what}", _WIDTH, subsequent_indent=" " * 14)


def _format_others(others: Sequence[tuple[str, int]]) -> str:
    return f", largest {others[0][0]} ({format_bytes(others[0][1])})" if others else ""


def _format_saved(report: OomReport, top: int) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[SavedPlace]] = {}
    for row in report.alive.saved:
        groups.setdefault((generalise(row.module), row.kind, row.line), []).append(row)
    if not groups or not top:
        return
    rows = [("bytes", "tensors", "module", "class", "line")]
    found = sorted(groups.items(), key=lambda item: -sum(row.bytes for row in item[1]))
    for (pattern, kind, line), places in found[:top]:
        module = f"{pattern} ({len(places)})" if len(places) > 1 else places[0].module
        if not kind:
            module = "(no module)"
        size, tensors = sum(row.bytes for row in places), sum(row.tensors for row in places)
        rows.append((format_bytes(size), str(tensors), module or "(model)", "" if module == kind else kind, line))
    yield "held for backward, by module and line that made it"
    yield from _format_table(rows)
    rest = found[top:]
    if rest:
        size = sum(row.bytes for _, places in rest for row in places)
        yield f"  and {format_bytes(size)} of {count_noun(len(rest), 'smaller row')}"


def _format_table(rows: Sequence[tuple[str, str, str, str, str]]) -> Iterator[str]:
    """Rows in columns. Classes, paths and lines are cut where the whole would be too wide."""
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    over = sum(widths) + 2 * len(widths) - _WIDTH
    for column, least in ((3, 10), (2, 24), (4, 16)):
        cut = max(0, min(over, widths[column] - least))
        widths[column], over = widths[column] - cut, over - cut
    size, count, module, kind, line = widths
    for row in rows:
        path, name, at = _cut_start(row[2], module), _cut_end(row[3], kind), _cut_start(row[4], line)
        yield f"  {row[0]:>{size}}  {row[1]:>{count}}  {path:{module}}  {name:{kind}}  {at}".rstrip()


def _cut_end(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _cut_start(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def _format_remedies(report: OomReport) -> Iterator[str]:
    if report.is_fragmentation:
        yield "there was enough memory, but not in one piece"
        yield from _wrap(
            "Let the allocator join the pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True in the "
            "environment before the program starts.",
            indent=2,
        )
    if report.judgement is not None and report.judgement.choices:
        yield from _format_judgement(report.judgement)
        return
    if not report.remedies:
        if report.alive.model and not report.is_fragmentation and not report.alive.compiled:
            yield from _wrap("recomputing would free nothing that modules hold at this point: make the batch smaller")
        return
    yield "what recomputing would have freed" + (
        f" (missing: {format_bytes(report.missing_bytes)})" if report.missing_bytes else ""
    )
    for remedy in report.remedies:
        yield from _wrap(_describe_remedy(remedy), indent=2)
        yield f"      {remedy.code}"


def _format_judgement(judgement: Judgement) -> Iterator[str]:
    has, needs = format_bytes(judgement.capacity_bytes), format_bytes(judgement.plain_bytes)
    yield from _wrap(f"what would make the step fit: it needs {needs} as it is, and has {has}")
    for choice in judgement.choices:
        yield from _wrap(_describe_choice(choice), indent=2)
        yield f"      {choice.code}"
    if not any(choice.is_enough is not False for choice in judgement.choices):
        yield from _wrap(
            "none of these is enough: make the batch or the sequence shorter, or shard the model", indent=2
        )


def _describe_choice(choice: Judged) -> str:
    costs = "" if choice.recompute_s is None else f", at most {format_seconds(choice.recompute_s)} more a step"
    verdict = {True: "enough", False: "not enough alone", None: "should be enough, but not all of the step was seen"}
    return f"{choice.what}: peak {format_bytes(choice.peak_bytes)}{costs}, {verdict[choice.is_enough]}"


def _describe_remedy(remedy: Remedy) -> str:
    size = format_bytes(remedy.freed_bytes)
    if remedy.modules == 1:
        whose, few = f"{remedy.pattern} ({remedy.kind})", ""
    else:
        ran = "" if remedy.ran == remedy.modules else f", {remedy.ran} of them hold something"
        whose = f"{remedy.pattern} ({remedy.modules} {remedy.kind}{ran})"
        few = f"; {'one is' if remedy.fewest == 1 else f'{remedy.fewest} are'} enough for it"
    if remedy.is_enough is None:
        return f"{whose}: {size}"
    return (
        f"{whose}: {size}, enough for this allocation{few if remedy.fewest < remedy.ran else ''}"
        if remedy.is_enough
        else (f"{whose}: {size}, not enough alone")
    )


def _format_notes(report: OomReport) -> Iterator[str]:
    for note in report.notes:
        yield from _wrap(f"note: {note}")


def _wrap(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
