"""Tells profilers when values are offloaded and when they come back. No torch here.

Process-wide, because values come back on autograd's threads. Holds as many listeners as profiles are being taken.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class Move(enum.Enum):
    """What happens to a value: it begins to leave, has left, begins to come back, is back."""

    LEAVES = "leaves"
    HAS_LEFT = "has left"
    RETURNS = "returns"
    IS_BACK = "is back"


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One move of one value.

    Attributes:
        move: what happens.
        value: tells the value from others, as long as it is away.
        storage: the memory on the device that it leaves, or comes back to; None where that is gone.
        bytes: that travel.
        tier: where to, or from.
    """

    move: Move
    value: int
    storage: Any
    bytes: int
    tier: str


Listener = Callable[[News], None]


class Listeners:
    """Those who want to know.

    Attributes:
        present: who is there. Read before anything is told: four times for each value that travels.
    """

    __slots__ = ("present",)

    def __init__(self) -> None:
        self.present: tuple[Listener, ...] = ()

    def tell(self, news: News) -> None:
        """Tell everybody."""
        for listener in self.present:
            listener(news)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Let somebody know while the block runs."""
        self.present = (*self.present, listener)
        try:
            yield
        finally:
            self.present = tuple(one for one in self.present if one is not listener)


listeners = Listeners()
