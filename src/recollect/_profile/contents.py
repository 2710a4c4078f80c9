"""What is in lists, dicts and other containers, kept aside and put back: the same objects in the same order."""

from __future__ import annotations

from collections import deque
from typing import Any

CONTAINERS = (list, dict, set, deque)


class Contents:
    """The contents that containers had when they were noted."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, Any]] = {}
        self._grown: dict[int, tuple[Any, Any]] = {}

    def note_lost(self, container: Any) -> None:
        """Keep what a dict or set has now, to give back what it loses or exchanges; what is added stays."""
        if isinstance(container, (dict, set)) and id(container) not in self._grown:
            self._grown[id(container)] = (container, container.copy())

    def note(self, container: Any, *, depth: int = 0) -> None:
        """Keep what a container has now, and what the containers in it have, to a depth; the first time counts.

        What `note_lost` kept of it before no longer does.
        """
        if not isinstance(container, CONTAINERS):
            if depth and isinstance(container, tuple):
                for part in container:
                    self.note(part, depth=depth - 1)
            return
        if id(container) not in self._noted:
            self._noted[id(container)] = (container, container.copy())
            self._grown.pop(id(container), None)
        if depth:
            for part in list(container.values() if isinstance(container, dict) else container):
                self.note(part, depth=depth - 1)

    def restore(self) -> None:
        """Put back what is no longer so."""
        for container, before in self._noted.values():
            refill(container, before)
        for container, before in self._grown.values():
            if isinstance(container, set):
                container.update(before)
            else:
                refill_grown(container, before)


def refill_grown(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict what it has lost or exchanged; what was added stays."""
    added = {key: value for key, value in container.items() if key not in before}
    refill(container, {**before, **added})


def refill(container: Any, before: Any) -> None:
    """Let a container hold what it held, and nothing else."""
    if isinstance(container, list):
        container[:] = before
    elif isinstance(container, dict):
        if not _is_same(container, before):
            container.clear()
            container.update(before)
    else:
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(before)


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Without asking whether tensors are equal."""
    return len(now) == len(before) and all(
        key is other and value is mine for (key, value), (other, mine) in zip(now.items(), before.items(), strict=True)
    )
