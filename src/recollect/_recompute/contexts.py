"""What forward runs under: contexts entered in order and left in reverse.

Not `contextlib.ExitStack`: when one of its contexts raises on leaving, its frame holds the exception, which holds the
frame, and with it every tensor on the way. An enclosing recomputation may well stop just there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any


class Contexts:
    """Contexts that have been entered."""

    __slots__ = ("_entered",)

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []

    def enter(self, contexts: Iterable[AbstractContextManager[Any]]) -> None:
        """Enter these, in order; where one raises, those before it are entered."""
        for context in contexts:
            context.__enter__()
            self._entered.append(context)

    def leave(self, error: BaseException | None = None) -> bool:
        """Leave all of them, also where one raises; gives whether one of them swallowed the error."""
        if not self._entered:
            return False
        context = self._entered.pop()
        is_swallowed = False
        try:
            if error is None:
                context.__exit__(None, None, None)
            else:
                is_swallowed = bool(context.__exit__(type(error), error, error.__traceback__))
        finally:
            is_swallowed = self.leave(None if is_swallowed else error) or is_swallowed
        return is_swallowed
