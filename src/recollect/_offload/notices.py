"""What is to be said to the user: noted wherever it happens, said once of each kind where a warning may raise."""

from __future__ import annotations

import warnings
from collections import deque


class Notices:
    """Warnings that wait to be given. Any thread may add one.

    Attributes:
        waiting: those that were not given yet. Looked at after each value, so it has no method in front of it.
    """

    __slots__ = ("_said", "waiting")

    def __init__(self) -> None:
        self._said: set[str] = set()
        self.waiting: deque[str] = deque()

    def add(self, kind: str, message: str) -> None:
        """Note a message, unless one of its kind was noted before."""
        if kind not in self._said:
            self._said.add(kind)
            self.waiting.append(message)

    def give(self) -> None:
        """Warn of what was noted; called without a lock."""
        while self.waiting:
            warnings.warn(self.waiting.popleft(), UserWarning, stacklevel=4)
