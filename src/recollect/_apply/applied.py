"""What was applied where, as data and as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


def describe_places(places: Sequence[AppliedPlace]) -> list[str]:
    """The lines of a table; places that differ in one number of their names share a line."""
    rows = [("module", "class", "what", "rule")]
    for group in _group(places):
        first = group[0]
        rows.append((_join([place.name for place in group]), first.class_name, first.what, first.rule))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join((*map(str.ljust, row, widths), row[3])).rstrip() for row in rows]


def _group(places: Iterable[AppliedPlace]) -> list[list[AppliedPlace]]:
    groups: dict[tuple[object, ...], list[AppliedPlace]] = {}
    for place in places:
        parts = place.name.split(".")
        # The first number is the layer's; others (experts, branches) stay apart.
        number = next((i for i, part in enumerate(parts) if _is_number(part)), None)
        frame = tuple("" if i == number else part for i, part in enumerate(parts))
        key = (frame, number, place.class_name, place.what, place.rule)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _join(names: list[str]) -> str:
    """Names that differ in one number as one.

    >>> _join(["layers.0.attn", "layers.1.attn", "layers.2.attn", "layers.5.attn"])
    'layers.0-2,5.attn'
    """
    if len(names) == 1:
        return names[0] or "(the model)"
    split = [name.split(".") for name in names]
    place = next(i for i, part in enumerate(split[0]) if _is_number(part))
    numbers = sorted(int(parts[place]) for parts in split)
    parts = list(split[0])
    parts[place] = _ranges(numbers)
    return ".".join(parts)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _ranges(numbers: list[int]) -> str:
    """Whole numbers in short: runs from-to, and steps from-to:step where all are evenly apart.

    >>> _ranges([0, 1, 2, 5]), _ranges([0, 2, 4, 6]), _ranges([3])
    ('0-2,5', '0-6:2', '3')
    """
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
