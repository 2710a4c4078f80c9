"""Tables and plots of what was measured, written into a page of the docs: one of each per model. Never by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from recollect._bench.compare import Row, compare
from recollect._bench.names import MODELS, MODES, SIZES, TITLES
from recollect._bench.results import Measured, Results
from recollect._core.numbers import format_seconds
from recollect._core.units import format_bytes

_PLACE = re.compile(r"(<!-- table: frontier -->\n).*?(<!-- end -->)", re.DOTALL)
_NEW_PAGE = "# Benchmarks\n\n<!-- table: frontier -->\n<!-- end -->\n"
_HEAD = (
    "| size, mode | way | peak | of activations | step | over plain | spread | recollect at that peak |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|"
)


def write_page(results: Results, page: Path, *, device: str) -> list[Path]:
    """Fill the place of a page that is for the frontiers, and write the plots beside it.

    Args:
        results: all that was measured.
        page: a file in Markdown, with ``<!-- table: frontier -->`` and ``<!-- end -->``, or a new one; plots go to its
            ``images/``.
        device: whose figures are shown.

    Returns:
        The files that were written.

    Raises:
        ValueError: an existing page has no such place, or nothing was measured on the device.
    """
    text = page.read_text("utf-8") if page.exists() else _NEW_PAGE
    if not _PLACE.search(text):
        message = f"{page} has no markers for the tables: expected <!-- table: frontier --> ... <!-- end -->"
        raise ValueError(message)
    if not any(one.cell.device == device for one in results.measured):
        message = f"nothing was measured on {device!r} yet: run recollect bench without --page first"
        raise ValueError(message)
    from recollect._bench.plot import draw_frontier, draw_frontiers

    written = []
    for model in MODELS:
        cells = find_cells(results, model, device)
        if any(cells.values()):
            image = page.parent / "images" / _image_name(model)
            image.parent.mkdir(exist_ok=True)
            image.write_bytes(draw_frontiers(_image_title(model), cells))
            written.append(image)
    first = find_first(results, device)
    if first is not None:
        image = page.parent / "images" / "frontier.svg"
        name = f"{TITLES.get(first.cell.model, first.cell.model)}, {first.shape}, {device}"
        image.write_bytes(draw_frontier(name, first))
        written.append(image)
    page.write_text(fill_page(results, text, device=device), "utf-8")
    return [page, *written]


def fill_page(results: Results, text: str, *, device: str) -> str:
    """The page's text with the tables of what was measured; plots are named, not drawn."""
    parts = [describe_run(results, device)]
    missing = []
    for model in MODELS:
        cells = find_cells(results, model, device)
        title = TITLES.get(model, model)
        if not any(cells.values()):
            missing.append(title)
            continue
        parts += [f"### {title}", "", f"![{_image_title(model)}](images/{_image_name(model)})", ""]
        parts += [*write_table(cells), "", *write_missing(cells)]
    if missing:
        parts += [f"Not measured yet, at any size, eager or compiled: {', '.join(missing)}.", ""]
    parts += write_largest(results, device)
    return _PLACE.sub(lambda match: "\n".join([match[1], *parts, match[2]]), text)


def _image_name(model: str) -> str:
    return f"frontier-{re.sub('[^a-z0-9]+', '', model.lower())}.svg"


def _image_title(model: str) -> str:
    return f"{TITLES.get(model, model)}: step time against peak memory"


def find_cells(results: Results, model: str, device: str) -> dict[tuple[str, str], Measured | None]:
    """The last measurements of a model, by size and mode; None where one is missing."""
    return {
        (size, mode): results.latest(model=model, size=size, mode=mode, device=device)
        for mode in MODES
        for size in SIZES
    }


def find_first(results: Results, device: str) -> Measured | None:
    """The cell that stands for all: of the first model that was measured, the large one if there is one."""
    for model in MODELS:
        cells = find_cells(results, model, device)
        for size in reversed(SIZES):
            if (one := cells[size, MODES[0]]) is not None:
                return one
    return None


def describe_run(results: Results, device: str) -> str:
    """Where the figures come from, in a sentence, and how often ours is slower."""
    own = [one for one in results.measured if one.cell.device == device]
    versions = sorted({one.cell.torch for one in own})
    commits = sorted({one.cell.commit for one in own})
    last = [one for model in MODELS for one in find_cells(results, model, device).values() if one is not None]
    rows = [row for one in last for row in compare(one) if row.is_rival]
    lost = [row for row in rows if row.is_lost]
    return (
        f"{device}, torch {', '.join(versions)}, recollect at {', '.join(commits)}. A step is forward, backward and "
        f"the optimizer's; times are medians of rounds. Rivals have {len(rows)} figures. In {len(lost)} of them, "
        "set in bold, recollect is slower at the same peak or does not reach that peak.\n"
    )


def write_table(cells: dict[tuple[str, str], Measured | None]) -> Iterator[str]:
    """The lines of a model's table; a cell that is missing has a line too."""
    for size in SIZES:
        shape = next((one.shape for (own, _), one in cells.items() if own == size and one is not None), "")
        if shape:
            yield f"{size}: {shape}."
    yield ""
    yield _HEAD
    for (size, mode), measured in cells.items():
        where = f"{size}, {mode}"
        if measured is None:
            yield f"| {where} | not measured yet | | | | | | |"
            continue
        rows = [row for row in compare(measured) if row.cost is not None]
        for number, row in enumerate(rows):
            named = f"{where}{' (a look)' * measured.is_quick}" if not number else ""
            yield f"| {named} | {' | '.join(_write_row(row))} |"
        if not rows:
            yield f"| {where} | nothing could be measured | | | | | | |"


def write_missing(cells: dict[tuple[str, str], Measured | None]) -> Iterator[str]:
    """The contenders without figures, with the reason, as a list; those with the same reason together."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (size, mode), measured in cells.items():
        for figure in measured.figures if measured is not None else ():
            if figure.median_s is None:
                reason = figure.failed or "no figures"
                by_reason.setdefault((f"{size}, {mode}", reason), []).append(figure.contender)
    by_names: dict[tuple[str, str], list[str]] = {}
    for (where, reason), names in by_reason.items():
        by_names.setdefault(("; ".join(names), reason), []).append(where)
    for (names_text, reason), places in by_names.items():
        yield f"* No figures for {names_text} ({'; '.join(places)}): {reason}"
    if by_names:
        yield ""


def _write_row(row: Row) -> Sequence[str]:
    figure = row.figure
    assert row.cost is not None
    ours = ""
    if row.is_rival and figure.peak_bytes is not None:
        ours = "none" if row.ours is None else f"{row.ours:+.1%}"
        ours = f"**{ours}**" if row.is_lost else ours
    return (
        figure.contender,
        "" if figure.peak_bytes is None else format_bytes(figure.peak_bytes),
        "" if row.share is None else f"{row.share:.0%}",
        format_seconds(figure.median_s),
        "" if figure.contender == "plain" else f"{row.cost:+.1%}",
        f"{figure.spread or 0:.1%}",
        ours,
    )


def write_largest(results: Results, device: str) -> Iterator[str]:
    """The longest contexts and the largest batches within a budget, as tables; nothing if none were looked for."""
    for unknown in ("length", "batch"):
        for model in MODELS:
            for size in SIZES:
                one = results.latest(model=model, size=size, mode=f"largest {unknown}", device=device)
                if one is None:
                    continue
                yield (
                    f"### {TITLES.get(model, model)}, {size}: largest {unknown} within {format_bytes(one.budget_bytes)}"
                )
                yield ""
                yield f"| way | {unknown} | peak | step | {unknown} per second |"
                yield "|---|--:|--:|--:|--:|"
                if one.is_partial:
                    yield "| more contenders | not measured yet | | | |"
                for row in one.reaches:
                    if row.failed or not row.value:
                        yield f"| {row.contender} | {row.failed or 'none fits'} | | | |"
                        continue
                    rate = f"{row.value / row.step_s:,.4g}" if row.step_s else ""
                    size_text = "" if row.peak_bytes is None else format_bytes(row.peak_bytes)
                    yield (f"| {row.contender} | {row.value:,} | {size_text} | {format_seconds(row.step_s)} | {rate} |")
                yield ""
