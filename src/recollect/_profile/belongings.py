"""Tensors that a step keeps in the user's own objects: a state that it carries on, in a dict, an attribute, a global.

Whoever runs a step on trial puts them back, so that the first real one begins with what it would have had. All else
stays: a list that grows is a log, numbers count the runs that there were, and flags tell of hooks that are set up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import CellType
from typing import Any

from torch import Tensor

from recollect._core.reachable import read_cell
from recollect._core.torch_private.fake import is_fake

_DEEPEST = 4


class Belongings:
    """What holders (see `find_holders`) hold now, to put tensors back that are exchanged.

    Args:
        holders: containers, dicts of attributes or globals, and cells of closures.
        only_fakes: whether only fake tensors, which came, are to go: then out of lists that grew, too.
    """

    def __init__(self, holders: Iterable[Any], *, only_fakes: bool = False) -> None:
        self._only_fakes = only_fakes
        self._before = [(holder, _read(holder)) for holder in holders]

    def put_back(self) -> None:
        """Let the holders hold the tensors that they held."""
        for holder, before in self._before:
            if isinstance(holder, dict):
                self._put_back_entries(holder, before)
                continue
            now = _read(holder)
            if (self._only_fakes or len(now) == len(before)) and any(map(self._counts, _changed(now, before))):
                _refill(holder, before)

    def _put_back_entries(self, holder: dict[Any, Any], before: dict[Any, Any]) -> None:
        for key, value in list(holder.items()):
            was = before.get(key)
            if value is was or not any(map(self._counts, (key, value, was))):
                continue
            if key in before:
                holder[key] = was
            else:
                del holder[key]
        for key, was in before.items():
            if key not in holder and self._counts(was):
                holder[key] = was

    def _counts(self, value: Any, depth: int = _DEEPEST) -> bool:
        if isinstance(value, Tensor):
            return not self._only_fakes or is_fake(value)
        if not depth or not isinstance(value, (list, tuple, set, dict, deque)):
            return False
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return any(self._counts(part, depth - 1) for part in parts)


def _changed(now: list[Any], before: list[Any]) -> list[Any]:
    """What came and what went."""
    ours, theirs = set(map(id, now)), set(map(id, before))
    return [value for value in (*now, *before) if (id(value) in ours) != (id(value) in theirs)]


def _read(holder: Any) -> Any:
    if isinstance(holder, CellType):
        return read_cell(holder)
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _refill(holder: Any, before: list[Any]) -> None:
    if isinstance(holder, CellType):
        del holder.cell_contents
        for value in before:
            holder.cell_contents = value
        return
    holder.clear()
    (holder.update if isinstance(holder, set) else holder.extend)(before)
