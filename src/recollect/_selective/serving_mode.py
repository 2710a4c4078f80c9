"""The modes around recomputation: give what was kept in place of running the operators again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor

from recollect._core.errors import MismatchError
from recollect._core.operators import (
    Operator,
    operator_of,
    tensors_in,
)
from recollect._core.places import Places
from recollect._core.scope import current_run, is_last_recomputation
from recollect._core.torch_private.collectives import answer
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.schemas import count_results, subject_of
from recollect._recompute.oplog import describe_tensor
from recollect._selective.kept_call import (
    KeptCall,
)
from recollect._selective.kept_calls import Counter, KeptCalls, Slipped
from recollect._selective.operator_modes import OperatorMode, at_places, metas_of
from recollect._selective.served_way import Server

if TYPE_CHECKING:
    from recollect._recompute.match import Recorder
    from recollect._recompute.rerun import Collector
    from recollect._recompute.way import Pack


def _given(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument that an operator writes into, as it was given; None if it writes into none."""
    for position, name in operator.writes[:1]:
        return args[position] if position < len(args) else kwargs.get(name)
    return None


class ChoiceMode(DispatchMode):
    """Gives recomputation the choices of forward, where nothing else was kept: a topk may come out otherwise.

    Args:
        choices: the results of forward's calls that choose, in order.
    """

    steps_aside = True

    def __init__(self, choices: list[list[Tensor]]) -> None:
        super().__init__()
        self._choices, self._next, self._run = choices, 0, current_run()
        self.is_paused = False

    def __enter__(self) -> Self:
        """A recomputation starts: from the first."""
        self._next, self._run = 0, current_run()
        return super().__enter__()

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the next choice if this is one, and gives as many tensors; else run it, as any that draws."""
        operator = operator_of(func)
        if self.is_paused or current_run() is not self._run:
            return func(*args, **kwargs)
        if operator.is_routing and self._next < len(self._choices):
            chosen = [tensor.detach() for tensor in self._choices[self._next]]
            self._next += 1
            if len(chosen) == count_results(func) and not operator.is_random:
                return chosen[0] if len(chosen) == 1 else tuple(chosen)
        return func(*args, **kwargs)


class ServingMode(OperatorMode, Server):
    """Gives recomputation what forward kept, in place of running it."""

    def __init__(
        self,
        kept_calls: KeptCalls,
        *,
        refuse: Callable[[KeptCall], None] | None = None,
        ops: frozenset[Any] | None = None,
    ) -> None:
        super().__init__(kept_calls, ops)
        self._refuse = refuse
        self.served = 0
        self.count_made: Callable[[], int] | None = None  # how many tensors the recomputation has saved so far

    def __enter__(self) -> Self:
        """A recomputation starts: count from the beginning."""
        self._counter = Counter()
        self.served = 0
        self._run = current_run()
        self._kept_calls.unpack()
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._kept_calls.let_go()

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what was kept of this call, or run it."""
        operator = operator_of(func)
        if operator.is_ignored or self._looks_away(func, operator, args, kwargs):
            return func(*args, **kwargs)
        is_tracked = torch.is_grad_enabled()
        subject = subject_of(func, args)
        call = self._counter.next((subject, is_tracked))
        kept = self._kept_calls.take((subject, is_tracked, call))
        if kept is None:
            return func(*args, **kwargs)
        self.served += is_tracked or kept.talks
        if self.count_made is not None and is_tracked and kept.position != self.count_made():
            self._slip(kept)
        given = tensors_in(args, kwargs)
        if kept.inputs != metas_of(args, kwargs):
            self._mismatch(kept, call, given)
        if kept.is_changed or kept.must_rerun:
            if self._refuse is not None:
                self._refuse(kept)
            return func(*args, **kwargs)
        result = kept.serve(is_last=is_last_recomputation())
        if kept.fills:
            for place, value in zip(at_places(operator.writes, args, kwargs), result, strict=True):
                place.copy_(value)
            return answer(func, _given(operator, args, kwargs))
        if not operator.writes:
            return result
        ((position, name),) = operator.writes
        target: Tensor = args[position] if position < len(args) else kwargs[name]
        return target.copy_(result)

    def _slip(self, kept: KeptCall) -> NoReturn:
        assert self.count_made is not None
        message = (
            f"region '{self._kept_calls.region}': {kept.label} ran after {kept.position} saved tensors in "
            f"forward, where its result was kept, and after {self.count_made()} in recomputation."
        )
        raise Slipped(message)

    def check(self, recorder: Recorder | Collector) -> Pack:
        """Each saved tensor is asked how many operators were kept before it; where few are seen, each operator is."""
        pack = recorder.pack()
        if self.is_paused:
            return pack
        if self.ops is not None:
            self.count_made = recorder.count_made
            return pack
        region, tally, index = self._kept_calls.region, self._kept_calls.tally, -1

        def checked(tensor: Tensor) -> Any:
            nonlocal index
            index += 1
            tally.check(region, index, self.served)
            return pack(tensor)

        return checked

    def gives_less(self, error: RuntimeError) -> bool:
        """Kept operators do not fit if the function did something only once, such as filling a cache."""
        self.is_paused = self.is_paused or isinstance(error, Slipped)
        return isinstance(error, Slipped)

    def held(self) -> list[Tensor]:
        """What is kept."""
        return self._kept_calls.tensors()

    def _mismatch(self, kept: KeptCall, call: int, given: list[Tensor]) -> None:
        was = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in kept.inputs or ())
        now = ", ".join(describe_tensor(tensor) for tensor in given)
        place = kept.place or Places(self._kept_calls.region).find(2)
        message = (
            f"region '{self._kept_calls.region}': call {call} of {kept.label}{place}, which was kept, ran on {was} in "
            f"forward and on {now} in recomputation.\n"
            "The function took a different path than in forward: it read something that changed in between.\n"
            "To see both operator logs side by side, wrap the step in `recollect.explain_mismatch()`."
        )
        raise MismatchError(message)
