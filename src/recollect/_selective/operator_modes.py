"""What keeps single operators: a mode around forward, and one around recomputation that serves them.

At a region's first call, to learn what its policy says (`decisions.py`), they are dispatch modes, which see every
operator and cost some microseconds for each. Once it is known which operators matter, only those are intercepted,
unless somebody's dispatch mode is on: then they are modes again, so that it sees what runs and nothing else. See
docs/design/selective.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from recollect._core.operators import (
    Operator,
    is_cached_cast,
    operator_of,
    talking,
    tensors_in,
)
from recollect._core.places import Place
from recollect._core.scope import current_run
from recollect._core.torch_private.compiled_calls import step_aside_for_compiled_code
from recollect._core.torch_private.dispatch import DispatchMode, dispatch_mode_depth
from recollect._core.torch_private.intercept import Interception
from recollect._selective.kept_call import (
    Meta,
)
from recollect._selective.kept_calls import Counter, KeptCalls
from recollect._selective.parameters import moves_parameters


class Outcome(Protocol):
    """What becomes of an operator's result: a line of `Decisions`, or whatever else says as much.

    Attributes:
        is_written: the function writes into the result afterwards, so that only a copy can be kept.
    """

    place: Place | None
    is_written: bool

    @property
    def is_kept(self) -> bool: ...

    @property
    def is_offloaded(self) -> bool: ...


Decide = Callable[[Any, Operator, int, tuple[Any, ...], dict[str, Any], Any], Outcome]
"""Asked of each operator after it ran: the operator, facts about it, which call of it, arguments, result."""


def metas_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Meta]:
    """What tells two calls of an operator apart."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(args, kwargs)]


def at_places(places: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments at these positions or of these names."""
    return tensors_in(*(args[position] if position < len(args) else kwargs.get(name) for position, name in places))


class OperatorMode(DispatchMode):
    """What both look away from: kept blocks, other recomputations, what autocast may cache, parameters' gathers.

    Attributes:
        ops: the operators that it looks at; None for all.
        saw_gather: whether parameters are gathered inside the region.
    """

    steps_aside = True

    def __init__(self, kept_calls: KeptCalls, ops: frozenset[Any] | None = None) -> None:
        super().__init__()
        step_aside_for_compiled_code()
        self._kept_calls, self.ops = kept_calls, ops
        self._counter = Counter()
        self._run = current_run()  # a backward inside the function may recompute: that is another run
        self.is_paused = self.saw_gather = False
        self._interception: Interception | None = None

    def __enter__(self) -> Self:
        if self.ops is None or dispatch_mode_depth():
            return super().__enter__()
        self._interception = Interception(self.ops, self.meet)
        self._interception.enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._interception is None:
            super().__exit__(exc_type, exc, traceback)
        else:
            interception, self._interception = self._interception, None
            interception.leave()

    def _looks_away(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.ops is not None and func not in self.ops:
            return True
        if self.is_paused or current_run() is not self._run or is_cached_cast(func, args, kwargs):
            return True
        # Parameters are gathered without gradients; whoever does it with them is seen at the collective.
        if (operator.is_collective or not torch.is_grad_enabled()) and moves_parameters():
            self.saw_gather = True
            return True
        return False


class _Overhearing(DispatchMode):
    """Listens to one operator on wrappers, such as distributed tensors: does what it does beneath talk to others?"""

    looks_beneath = True

    def __init__(self) -> None:
        super().__init__()
        self.talks = False

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and note whether it talks."""
        self.talks = self.talks or operator_of(func).is_collective
        return func(*args, **kwargs)


def run_and_listen(
    func: Callable[..., Any], operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Operator]:
    """Run an operator on wrappers; gives its result, and the operator as it was at this call."""
    with _Overhearing() as heard:
        result = func(*args, **kwargs)
    return result, talking(operator) if heard.talks else operator
