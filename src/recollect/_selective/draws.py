"""Checks that the calls of one forward draw random numbers only where they are known to."""

from __future__ import annotations

from typing import Any

from recollect._recompute.rng import Source
from recollect._selective.kept_call import States, read_states


class Draws:
    """Where the generators stood before and after the calls that draw: between them nothing may move."""

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first: dict[Source, Any] = {}  # before the first call that draws from it
        self._last: dict[Source, Any] = {}  # after the last one

    def begin(self, sources: list[Source]) -> tuple[States | None, bool]:
        """A call that draws begins: where its generators stand, and whether the last call left them there.

        They cannot be read while a CUDA graph is being captured: then it gives None.
        """
        now = read_states(sources)
        last, is_known = self._last, True
        for source, state in now or ():
            if source in last:
                is_known = is_known and source.same(last[source], state)
            else:
                self._first[source] = state
        return now, is_known

    def end(self, sources: list[Source]) -> None:
        """It has ended."""
        for source in sources:
            self._last[source] = source.read()

    def are_all(self, moved: States) -> bool:
        """Forward is over: whether only calls that are known to draw did.

        Args:
            moved: the generators that moved, and where they stood at entry.
        """
        first, last = self._first, self._last
        return all(source in first and source.same(state, first[source]) for source, state in moved) and all(
            source.same(state, source.read()) for source, state in last.items()
        )
