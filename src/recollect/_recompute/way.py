"""What a frame is given: the options of its region, and its way of getting values back, behind one small protocol."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from recollect._core.pytree import Arguments

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame
    from recollect._recompute.match import Matcher

Pack = Callable[[Tensor], Any]
Hooks = tuple[Pack, Callable[[Any], Tensor]]
"""What packs a saved tensor, and what unpacks it."""

Sides = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What forward runs under, and what recomputation does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller of a region chose; the same object serves every call with the same options.

    Attributes:
        preserve: the kinds of random generator that are put back for recomputation.
        early_stop: whether recomputation ends with the last tensor that is needed.
        matcher: how what is recomputed is compared with forward.
        contexts: makes what forward and recomputation run under.
        explain: whether an error shows the operators of both.
        counts_runs: whether a number that a module's forward sets in an attribute (a counter) moves in recomputation,
            too, as with torch.
    """

    preserve: frozenset[str]
    early_stop: bool
    matcher: Matcher
    contexts: Callable[[], Sides] | None = None
    explain: bool = False
    counts_runs: bool = False


class Producer(Protocol):
    """Makes values for one pass, each when it is asked for."""

    def take(self, index: int) -> Tensor | None:
        """Saved tensor `index`; None if it was among several that were filled in at once."""

    def be_last(self) -> None:
        """No other pass will follow: what is used for the last time may go."""


class Way(Protocol):
    """How frames get their values back."""

    def begin(self, frame: Frame, arguments: Arguments) -> tuple[Sides | None, Pack]:
        """Before forward: what it and recomputation run under, and the pack hook of forward."""

    def settle(self, frame: Frame) -> None:
        """After forward: all is known that recomputation will need."""

    def refill(self, frame: Frame, *, is_last: bool) -> None:
        """A pass asks for the first time: fill `frame.values`, or set `frame.producer` to fill them on demand."""

    def read(self, frame: Frame, index: int) -> Tensor:
        """Make one saved tensor alone and keep nothing: a read outside backward, or of a value already used."""

    def held(self, frame: Frame) -> list[tuple[str, Any]]:
        """What is held beyond the inputs: what each is, and the tensor."""
