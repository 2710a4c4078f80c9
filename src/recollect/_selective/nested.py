"""What a region inside another one keeps: in the outer one's recomputation the same as in its forward.

The kept values of an inner region are saved tensors of the outer one (`KeptCalls.settle`), which knows them by number.
So the inner region must keep the same calls, and hand them over in the same order, when the outer one runs again. It
may have decided on more by then: it has learned, or another function of that name has. Forward therefore notes, with
the frame around, which calls it kept, and recomputation follows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from recollect._core.places import Place
from recollect._recompute.handles import frame_of
from recollect._recompute.way import Hooks


class _OuterDecision:
    """What becomes of a call, decided before."""

    __slots__ = ("is_kept", "is_written", "place")

    is_offloaded = False  # what is kept is the enclosing region's

    def __init__(self, *, is_kept: bool) -> None:
        self.is_kept, self.is_written = is_kept, False
        self.place: Place | None = None


_KEPT, _NOT_KEPT = _OuterDecision(is_kept=True), _OuterDecision(is_kept=False)


def is_of_operator(key: tuple[Any, ...]) -> bool:
    """Whether a kept call is one of an operator: those are numbered apart by grad mode, which blocks are not."""
    return len(key) > 2  # noqa: PLR2004


class KeptInside:
    """The calls that one execution of an inner region handed over, in order; None until its forward is over."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[Any, None] | None = None

    def note(self, keys: Iterable[Any]) -> None:
        """Forward is over: these were handed over."""
        self.keys = dict.fromkeys(keys)

    @property
    def has_ops(self) -> bool:
        """Whether single operators are among them."""
        return any(map(is_of_operator, self.keys or ()))

    def decide(self, func: Any, _operator: Any, call: int, *_: Any) -> _OuterDecision:
        """Whether this call of an operator was kept."""
        return _KEPT if self.keys is not None and (func, torch.is_grad_enabled(), call) in self.keys else _NOT_KEPT


def kept_inside(hooks: Hooks | None) -> KeptInside | None:
    """For an execution inside these hooks: new ones in forward, in recomputation those of forward.

    None if the hooks are not a region's.
    """
    frame = None if hooks is None else frame_of(hooks[0])
    if hooks is None or frame is None:
        return None
    nested: list[KeptInside] | None = getattr(frame, "nested", None)
    if frame.unpack == hooks[1]:  # of forward
        if nested is None:
            nested = frame.nested = []
        nested.append(KeptInside())
        return nested[-1]
    turn: Iterator[KeptInside] | None = getattr(hooks[0], "turn", None)
    if turn is None:
        turn = hooks[0].turn = iter(list(nested or ()))  # type: ignore[attr-defined]
    inside = next(turn, None)
    return inside if inside is not None and inside.keys is not None else None
