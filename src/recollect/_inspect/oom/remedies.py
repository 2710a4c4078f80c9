"""Which modules, recomputed, would have made room, and the line to write for it. Plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from recollect._core.patterns import compile_pattern

_MOST = 3
_LEAST = 0.1  # of what is missing, or the best frees: less is not worth a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A module that could be recomputed."""

    path: str
    kind: str
    freed_bytes: int
    """Held by its graph alone; its inputs stay. 0 for one that has not run."""
    operators: int
    """Autograd nodes of its calls: what would run again."""
    is_block: bool
    """Whether it is one of the model's repeated blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Modules of one kind to recompute."""

    pattern: str
    """Their paths: ``layers.*``."""
    kind: str
    modules: int
    """How many there are in the model."""
    ran: int
    """How many of them hold what could be freed."""
    fewest: int
    """How many, from the first on, are enough for this allocation; all that ran, if they are not."""
    freed_bytes: int
    """What recomputing all of them would have freed when memory ran out."""
    operators: int
    """What would run again of those that are enough."""
    is_enough: bool | None
    """Whether this allocation would have succeeded; None if it is not known how much was missing."""
    code: str
    """The line to write, with ``model`` for the model."""
    is_blocks: bool = False
    """Whether these are all of the model's repeated blocks."""


def find_remedies(
    candidates: Sequence[Candidate], *, missing_bytes: int | None, failed_module: str, is_forward: bool
) -> tuple[Remedy, ...]:
    """The groups of modules of one kind that free something: blocks first, then what is enough, fewest operators first.

    Args:
        candidates: the model's modules, in its order.
        missing_bytes: how much has to be freed.
        failed_module: where memory ran out. Modules around it would be running all the same, and free nothing.
        is_forward: whether later modules have not run yet; then all of a kind are to be recomputed.
    """
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((generalise(candidate.path), candidate.kind), []).append(candidate)
    blocks = {one.path for one in candidates if one.is_block}
    found = []
    for (pattern, kind), group in groups.items():
        free = [0 if _is_around(one.path, failed_module) else one.freed_bytes for one in group]
        freed = sum(free)
        if not freed:
            continue
        fewest = _count_fewest(free, missing_bytes)
        first = fewest if not is_forward and fewest < len(group) else None
        ran = sum(size > 0 for size in free)
        found.append(
            Remedy(
                pattern=pattern if len(group) > 1 else group[0].path,
                kind=kind,
                modules=len(group),
                ran=ran,
                fewest=min(fewest, ran),
                freed_bytes=freed,
                operators=sum(one.operators for one in group[:fewest]),
                is_enough=None if missing_bytes is None else freed >= missing_bytes,
                is_blocks={one.path for one in group} == blocks,
                code=_write(group, candidates, pattern, first),
            )
        )
    # What is enough for this allocation may fail at the next: the blocks free most of the step, so they come first.
    found.sort(
        key=lambda one: (
            not (one.is_blocks and one.is_enough is not False),
            one.is_enough is not True,
            one.operators if one.is_enough else -one.freed_bytes,
        )
    )
    least = _LEAST * max(missing_bytes or 0, max((one.freed_bytes for one in found), default=0))
    return tuple(one for one in found if one.is_enough or one.freed_bytes >= least)[:_MOST]


def generalise(path: str) -> str:
    """A path with its first number left open.

    >>> generalise("layers.3.mlp.0"), generalise("head")
    ('layers.*.mlp.0', 'head')
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=1)


def _is_around(path: str, inner: str) -> bool:
    return inner == path or inner.startswith(f"{path}.")


def _count_fewest(free: Sequence[int], missing_bytes: int | None) -> int:
    """How many, from the first on, free enough; up to the last that frees anything, if they do not."""
    freed, last = 0, 0
    for count, size in enumerate(free, 1):
        if size:
            freed, last = freed + size, count
        if missing_bytes is not None and freed >= missing_bytes:
            break
    return last


def _write(group: Sequence[Candidate], candidates: Sequence[Candidate], pattern: str, first: int | None) -> str:
    """A call of `recollect.apply` that makes regions of this group."""
    paths = {one.path for one in group}
    arguments = ["model"]
    if paths != {one.path for one in candidates if one.is_block}:
        arguments.append(f'{{{_write_key(group, candidates, pattern)}: "full"}}')
    if first is not None:
        arguments.append(f"first={first}")
    return f"recollect.apply({', '.join(arguments)})"


def _write_key(group: Sequence[Candidate], candidates: Sequence[Candidate], pattern: str) -> str:
    if len(group) == 1:
        return f'"{group[0].path}"'
    paths = {one.path for one in group}
    matches = compile_pattern(pattern)
    if {one.path for one in candidates if matches(one.path)} == paths:
        return f'"{pattern}"'
    numbers = "|".join(re.search(r"(?<![^.])\d+(?![^.])", one.path)[0] for one in group)  # type: ignore[index]
    return 'r"re:{}"'.format(re.escape(pattern).replace(r"\*", f"({numbers})", 1))
