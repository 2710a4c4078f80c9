"""What is to be said to the user: noted wherever it happens, said once of each kind where a warning may raise."""

from __future__ import annotations

import warnings
from collections import deque

from recollect._core.units import format_bytes


class Notices:
    """Warnings that wait to be given. Any thread may add one.

    Attributes:
        waiting: those that were not given yet. Looked at after each value, so it has no method in front of it.
    """

    __slots__ = ("_said", "waiting")

    def __init__(self) -> None:
        self._said: set[str] = set()
        self.waiting: deque[str] = deque()

    def note_warning(self, kind: str, message: str) -> None:
        """Note a message, unless one of its kind was noted before."""
        if kind not in self._said:
            self._said.add(kind)
            self.waiting.append(message)

    def add_in_host(self) -> None:
        """Values are in host memory by nature, and nothing slower is at hand."""
        self.note_warning(
            "host",
            "values that are already in host memory stay where they are: moving them to the host tier would free "
            "nothing.\n"
            "On a machine without an accelerator use the disk tier: recollect.offload(tier='disk').",
        )

    def add_no_room(self, what: str, *, limit: int | None) -> None:
        """Host memory is used up, or as much of it as the user allows; `what` says which value stays where."""
        why = "no more host memory" if limit is None else f"the host limit of {format_bytes(limit)} is reached"
        self.note_warning(
            "limit",
            f"{why}: {what}, and so does everything else that does not fit.\n"
            "Raise `limit`, or let the rest go to disk: tier=('host', 'disk').",
        )

    def give(self) -> None:
        """Warn of what was noted; called without a lock."""
        while self.waiting:
            warnings.warn(self.waiting.popleft(), UserWarning, stacklevel=4)
