"""The tree of modules with identical siblings as one: 32 layers are a line, and what they hold appears once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from recollect._report.summary import ModuleRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A module, or several identical ones; the numbers are of all of them together.

    Attributes:
        label: name of the module in its parent: ``"mlp"``; of several: ``"0 ... 31"``.
        path: of the first.
        count: how many there are.
        kind: the name of their class.
        depth: how deep they are in the tree.
        saved_bytes: what forward leaves for backward.
        parameter_bytes: of their parameters.
        forward_s: how long forward takes; None without times.
        backward_s: the same of backward.
        recompute_s: the same of recomputation.
    """

    label: str
    path: str
    count: int
    kind: str
    depth: int
    saved_bytes: int
    parameter_bytes: int
    forward_s: float | None
    backward_s: float | None
    recompute_s: float | None


def fold_modules(rows: Sequence[ModuleRow]) -> list[Branch]:
    """The tree, in its order, with siblings as one that follow each other by number and hold the same.

    Args:
        rows: as `summary.list_modules` gives them.
    """
    if not rows:
        return []
    children: defaultdict[str, list[ModuleRow]] = defaultdict(list)
    above: list[ModuleRow] = []
    for row in rows:
        del above[row.depth :]
        if above:
            children[above[-1].path].append(row)
        above.append(row)
    likenesses: dict[str, int] = {}
    known: dict[object, int] = {}
    for row in reversed(rows):  # children come after their parents
        inner = tuple((_name(child), likenesses[child.path]) for child in children[row.path])
        likeness = (row.kind, row.saved_bytes, row.parameter_bytes, row.calls, inner)
        likenesses[row.path] = known.setdefault(likeness, len(known))
    found: list[Branch] = []
    waiting = [[rows[0]]]
    while waiting:
        members = waiting.pop()
        found.append(_sum_up(members))
        columns = zip(*(children[member.path] for member in members), strict=True)
        waiting += reversed(_group(columns, likenesses))
    return found


def _group(columns: Iterable[tuple[ModuleRow, ...]], likenesses: dict[str, int]) -> list[list[ModuleRow]]:
    """Children of identical parents, column by column; identical numbered ones become one."""

    def key(column: tuple[ModuleRow, ...]) -> object:
        is_part = _name(column[0]).isdigit()
        return likenesses[column[0].path] if is_part else column[0].path

    return [[row for column in alike for row in column] for _, alike in groupby(columns, key=key)]


def _sum_up(members: list[ModuleRow]) -> Branch:
    first, names = members[0], list(dict.fromkeys(_name(row) for row in members))
    return Branch(
        label=names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}",
        path=first.path,
        count=len(members),
        kind=first.kind,
        depth=first.depth,
        saved_bytes=sum(row.saved_bytes for row in members),
        parameter_bytes=sum(row.parameter_bytes for row in members),
        forward_s=_add([row.forward_s for row in members]),
        backward_s=_add([row.backward_s for row in members]),
        recompute_s=_add([row.recompute_s for row in members]),
    )


def _add(times: list[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return sum(known) if known else None


def _name(row: ModuleRow) -> str:
    return row.path.rpartition(".")[2]
