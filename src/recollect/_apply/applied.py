"""What was applied where, as data and as a table."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recollect._core.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPlace:
    """What became of one module."""

    name: str
    """Its name in the model, without wrappers."""
    class_name: str
    what: str
    """What happens to it, in words."""
    rule: str
    """The rule that decided, as its user wrote it."""
    is_region: bool
    """Whether its calls are regions."""
    is_kept: bool
    """Whether it lies in a region and is not run again there, or in an offloaded module and is not offloaded."""
    is_sent: bool = False
    """Whether what its calls save for backward is sent away."""


_HEADS = ("module", "class", "what", "rule")


def describe_places(places: Sequence[AppliedPlace]) -> list[str]:
    """The lines of a table; places that differ only in the numbers of their names share a line."""
    rows = [_HEADS, *_rows(places)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join((*map(str.ljust, row, widths), row[3])).rstrip() for row in rows]


def write_html(head: str, places: Sequence[AppliedPlace], notes: Iterable[str]) -> str:
    """The same as HTML, for notebooks."""
    cells = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(places)]
    names = "".join(f"<th>{name}</th>" for name in _HEADS)
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    style = 'style="text-align:left"'
    return (
        f"<div><p><b>{html.escape(head)}</b></p><table {style}><thead><tr>{names}</tr></thead>"
        f"<tbody>{''.join(cells)}</tbody></table>{said}</div>"
    )


def describe_effect(
    peak_bytes: int, plain_peak_bytes: int, step_s: float | None, plain_step_s: float | None, *, how: str
) -> str:
    """What regions free and cost, in a sentence.

    >>> describe_effect(60 * 2**20, 100 * 2**20, 1.3, 1.0, how="as planned")
    'frees 40.00 MiB of a peak of 100.00 MiB (40%), costs 30% more time, as planned'
    """
    freed = plain_peak_bytes - peak_bytes
    share = f" ({freed / plain_peak_bytes:.0%})" if plain_peak_bytes else ""
    text = f"frees {format_bytes(freed)}" if freed >= 0 else f"takes {format_bytes(-freed)} more"
    text += f" of a peak of {format_bytes(plain_peak_bytes)}{share}" if freed >= 0 else ""
    if step_s is not None and plain_step_s:
        change = step_s / plain_step_s - 1
        text += f", costs {change:.0%} more time" if change >= 0 else f", takes {-change:.0%} less time"
    return f"{text}, {how}"


def _rows(places: Iterable[AppliedPlace]) -> list[tuple[str, str, str, str]]:
    """A row for each group of places that differ only in the numbers of their names."""
    groups: dict[tuple[object, ...], list[AppliedPlace]] = {}
    for place in places:
        parts = tuple("" if _is_number(part) else part for part in place.name.split("."))
        groups.setdefault((parts, place.class_name, place.what, place.rule), []).append(place)
    return [
        (_join([place.name for place in group]), group[0].class_name, group[0].what, group[0].rule)
        for group in groups.values()
    ]


def _join(names: list[str]) -> str:
    """Names that differ only in numbers as one; with how many they are, where the numbers do not tell.

    >>> _join(["layers.0.attn", "layers.1.attn", "layers.2.attn", "layers.5.attn"])
    'layers.0-2,5.attn'
    >>> _join(["layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0", "layers.1.experts.1"])
    'layers.0-1.experts.0-1'
    >>> _join(["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"])
    'stages.*.blocks.* (3)'
    """
    if len(names) == 1:
        return names[0] or "(the model)"
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    sizes = [len(set(column)) for column in columns]
    if math.prod(sizes) == len(names):
        return ".".join(
            column[0] if size == 1 else _ranges(column) for column, size in zip(columns, sizes, strict=True)
        )
    parts = (column[0] if size == 1 else "*" for column, size in zip(columns, sizes, strict=True))
    return f"{'.'.join(parts)} ({len(names)})"


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _ranges(written: Iterable[str]) -> str:
    """Whole numbers in short: runs from-to, and steps from-to:step where all are evenly apart.

    >>> _ranges("0125"), _ranges("0246"), _ranges("3")
    ('0-2,5', '0-6:2', '3')
    """
    numbers = sorted({int(one) for one in written})
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:  # noqa: PLR2004
        return f"{numbers[0]}-{numbers[-1]}:{steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
