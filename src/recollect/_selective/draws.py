"""Checks that the calls of one forward draw random numbers only where they are known to."""

from __future__ import annotations

from typing import Any

from recollect._core.operators import tensors_in
from recollect._selective.kept_call import States, read_states, sources_of


class Draws:
    """Where the generators stood before and after the calls that draw: between them nothing may move."""

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first: States | None = None  # before the first call that draws
        self._last: States | None = None  # after the last one

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[States | None, bool]:
        """A call that draws begins: where its generators stand, and whether the last call left them there.

        They cannot be read while a CUDA graph is being captured: then it gives None.
        """
        now = _read(args, kwargs)
        if now is None:
            return None, True
        if self._last is None:
            self._first = now
            return now, True
        return now, _agree(self._last, now)

    def end(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """It has ended."""
        self._last = _read(args, kwargs)

    def are_all(self, moved: States) -> bool:
        """Forward is over: whether only calls that are known to draw did.

        Args:
            moved: the generators that moved, and where they stood at entry.
        """
        if not moved and self._first is None:
            return True
        first, last = self._first or [], self._last or []
        known = {id(source) for source, _ in first}
        return (
            all(id(source) in known for source, _ in moved)
            and _agree(moved, first)
            and _agree(last, [(source, source.read()) for source, _ in last])
        )


def _read(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> States | None:
    values = (*args, *(kwargs or {}).values())
    return read_states(sources_of(tensors_in(*values), values))


def _agree(one: States, other: States) -> bool:
    """Whether the generators that are in both have the same states."""
    found = {id(source): state for source, state in other}
    return all(source.same(state, found[id(source)]) for source, state in one if id(source) in found)
