"""The way of a frame that has a program: backward replays what is asked for, in place of running the function again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from recollect._core.pytree import Arguments
from recollect._core.torch_private.ambient import any_autocast_enabled
from recollect._core.torch_private.engine import set_grad_enabled
from recollect._recompute.frame import Frame
from recollect._recompute.handles import find_live, is_live
from recollect._recompute.surroundings import Surroundings
from recollect._selective.program import Bound, Program, SentValue
from recollect._selective.replay import Replay

Fill = Callable[[int, Tensor], None]


class Replaying:
    """Replays a program on what one execution has of it.

    Args:
        program: what to call for what.
        bound: kept values, tensors from outside, arguments.
        begin_pass: called when a pass asks for the first time.
    """

    __slots__ = ("_begin_pass", "bound", "program")

    def __init__(self, program: Program, bound: Bound, begin_pass: Callable[[], None]) -> None:
        self.program, self.bound, self._begin_pass = program, bound, begin_pass

    def begin(self, frame: Frame, arguments: Arguments) -> NoReturn:
        """Never: a frame comes to this way when its forward is over.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(frame, arguments)

    def settle(self, frame: Frame) -> None:
        """Forward is over already."""

    def refill(self, frame: Frame, *, is_last: bool) -> None:
        """Have values made when they are asked for."""
        self._begin_pass()
        frame.producer = self._producer(frame, find_live(frame.handles), _filler(frame), is_last=is_last)

    def read(self, frame: Frame, index: int) -> Tensor:
        """Replay for one saved tensor alone."""
        inner: dict[int, Tensor] = {}
        live = [number == index for number in range(len(frame.handles))]
        value = self._producer(frame, live, inner.__setitem__, is_last=False).take(index)
        return inner[index] if value is None else value

    def held(self, frame: Frame) -> list[tuple[str, Any]]:
        """What replay starts from, and what is not forgotten at all."""
        held = (one.handle if isinstance(one, SentValue) else one for one in self.bound.held if one is not None)
        found = [("kept", tensor) for tensor in held]
        return found + [("kept", tensor) for tensor, _ in (frame.held or {}).values()]

    def _producer(self, frame: Frame, live: list[bool] | None, fill: Fill, *, is_last: bool) -> ReplayProducer:
        assert frame.inputs is not None
        program, bound = self.program, self.bound
        if live is None:
            uses = list(program.uses)
        else:
            uses = program.count_uses([index for index, is_asked in enumerate(live) if is_asked], bound.held)
            if is_last:
                bound.held = [held if count else None for held, count in zip(bound.held, uses, strict=True)]
        leaves = frame.inputs.materialise(frame.name)
        replay = Replay(frame.name, program, bound, leaves, uses, is_last=is_last, fill=fill)
        return ReplayProducer(replay, frame.around)


def _filler(frame: Frame) -> Fill:
    """What takes the inner saved tensors of a call, which come all at once; holds no frame."""
    values, kept, handles, keeps_graph = frame.values, frame.kept, frame.handles, frame.keeps_graph

    def fill(index: int, value: Tensor) -> None:
        if index in kept or not is_live(handles, index):
            return
        made = (value, value._version)  # noqa: SLF001
        if keeps_graph:
            kept[index] = made
        else:
            values[index] = made

    return fill


class ReplayProducer:
    """The replay of one pass, each value made under what was around forward.

    Whether that stands as it stood is seen once per pass; only autocast may be switched by a node (`custom_bwd`).
    """

    __slots__ = ("_around", "_is_as_before", "_replay")

    def __init__(self, replay: Replay, around: Surroundings) -> None:
        self._replay, self._around = replay, around
        ambient = around.restore_ambient()
        self._is_as_before = ambient is None and not any_autocast_enabled()
        if ambient is not None:
            ambient.close()

    def be_last(self) -> None:
        """No other pass will follow."""
        self._replay.be_last()

    def take(self, index: int) -> Tensor | None:
        """A saved tensor; None for one inside a call, which was filled in."""
        grad_was_enabled = torch.is_grad_enabled()
        ambient = None
        is_cached = False
        if (not self._is_as_before or any_autocast_enabled()) and not self._replay.has(index):
            # Where backward runs under the user's autocast, that would hold each cast of a replayed value to its end.
            is_cached = any_autocast_enabled() and torch.is_autocast_cache_enabled()
            ambient = self._around.restore_ambient()
        if is_cached:
            torch.set_autocast_cache_enabled(False)
        if grad_was_enabled:
            set_grad_enabled(False)
        try:
            return self._replay.take(index)
        finally:
            if is_cached:
                torch.set_autocast_cache_enabled(True)
            if ambient is not None:
                ambient.close()
            if grad_was_enabled:
                set_grad_enabled(True)
