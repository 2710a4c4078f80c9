"""Fake tensors that a dry step leaves in what is the user's: a list of losses, a state, an attribute, a global.

A later step would take them for real ones and silently compute nothing. What was there before takes their place; all
else stays as the step leaves it.
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


class LeftTensors:
    """What holders of `find_holders` hold now, to put back where fake tensors are later."""

    def __init__(self, holders: Iterable[Any]) -> None:
        self._before = [(holder, _read(holder)) for holder in holders]

    def put_back(self) -> None:
        """Let none of the holders have a fake tensor, nor a new container with one."""
        for holder, before in self._before:
            if isinstance(holder, dict):
                for key, value in list(holder.items()):
                    if value is not before.get(key) and _has_fake((key, value)):
                        if key in before:
                            holder[key] = before[key]
                        else:
                            del holder[key]
            else:
                known = set(map(id, before))
                if any(_has_fake(value) for value in _read(holder) if id(value) not in known):
                    _refill(holder, before)


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


def _has_fake(value: Any, depth: int = _DEEPEST) -> bool:
    if isinstance(value, Tensor):
        return is_fake(value)
    if not depth or not isinstance(value, (list, tuple, set, dict, deque)):
        return False
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(_has_fake(part, depth - 1) for part in parts)
