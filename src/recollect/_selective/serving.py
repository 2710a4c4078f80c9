"""Keeps single operators at the least cost: in forward their results, which recomputation is given in their place.

For what is plain: operators that neither write nor talk to other processes, called with grad mode on, in a region that
stands alone and keeps nothing else. Only those operators are intercepted; everything else runs as if nobody
looked on. `operator_modes.py` does the same for whatever is not plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect._core.operators import is_cached_cast, operator_of, tensors_in
from recollect._core.scope import current_run, is_last_recomputation
from recollect._core.torch_private.dispatch import DispatchMode, dispatch_mode_depth, quick_alias
from recollect._core.torch_private.intercept import Interception
from recollect._recompute.hooks import StopRecomputation
from recollect._recompute.rng import put_back
from recollect._selective.kept_call import States, copy_unseen, moved_states, read_states, sources_of
from recollect._selective.kept_calls import Slipped
from recollect._selective.served_way import Server

if TYPE_CHECKING:
    from recollect._recompute.match import Recorder
    from recollect._recompute.rerun import Collector
    from recollect._recompute.way import Pack

Wanted = dict[Any, dict[int, bool]]
"""By operator: which of its calls are kept, and whether as a copy, because the function writes into the result."""

DrawnStates = dict["Call", States]
"""By call: where the generators that it moved stood afterwards."""

Call = tuple[int, int]
"""An operator, by its id, and the number of its call: torch hashes operators in Python, 0.15 µs each time."""

Kept = tuple[Any, int | list[int], int, bool]
"""A result, its version (of several tensors, a list), how many tensors were saved before, whether it is a copy."""

_is_grad_enabled = torch.is_grad_enabled


class Serving(Server):
    """What one execution keeps; the context that its recomputations run under.

    Args:
        region: its name.
        wanted: what to keep.
        unneeded: calls that recomputation stops before; added to.
        saved: grows with each tensor that forward saves.
        preserves: whether generators stand in recomputation where they stood in forward.
    """

    __slots__ = (
        *("_counts", "_driver", "_region", "_run", "_states", "_unneeded"),
        *("calls", "count_made", "forward", "is_off"),
    )

    def __init__(
        self, region: str, wanted: Wanted, unneeded: set[Any], saved: Sequence[Any], *, preserves: bool = True
    ) -> None:
        self._region, self._unneeded = region, unneeded
        self.calls: dict[Call, Kept] = {}
        self._states: DrawnStates = {}
        self.forward = _Forward(wanted, unneeded, saved, self.calls, self._states if preserves else None)
        self.count_made: Callable[[], int] = int
        self.is_off = False
        self._driver: Interception | _Mode | None = None

    def __enter__(self) -> None:
        ops = self.forward.ops
        if self.is_off or not ops:
            return
        self._counts = dict.fromkeys(map(id, ops), 0)
        self._run = current_run()
        self._driver = driver = (_Mode if dispatch_mode_depth() else Interception)(ops, self._meet)
        driver.enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        driver.leave()
        if self.calls and is_last_recomputation() and (error is None or isinstance(error, StopRecomputation)):
            self._unneeded.update(self.calls)  # it stopped before it came there: so it will the next time

    def _meet(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what was kept of this call, or run it."""
        if not _is_grad_enabled() or current_run() is not self._run or is_cached_cast(op, args, kwargs):
            return op(*args, **kwargs)
        counts, key = self._counts, id(op)
        number = counts[key]
        counts[key] = number + 1
        is_last = is_last_recomputation()
        kept = self.calls.pop((key, number), None) if is_last else self.calls.get((key, number))
        if kept is None:
            return op(*args, **kwargs)
        result, versions, position, is_copy = kept
        if position != self.count_made():
            message = (
                f"region '{self._region}': {op} ran after {position} saved tensors in forward, where its result was "
                f"kept, and after {self.count_made()} in recomputation."
            )
            raise Slipped(message)
        if versions != _versions(result):  # written into since: what it was is lost
            return op(*args, **kwargs)
        if self._states:
            put_back(self._states.get((key, number), []))
        if is_last:
            return result
        return _map(copy_unseen if is_copy else Tensor.detach, result)

    def serve_nothing(self) -> None:
        """What was kept does not fit: from now on everything runs again."""
        self.is_off = True

    def serve_choices(self) -> None:
        """What was kept may not be what its operators gave: give nothing but choices, which nobody writes into."""
        choosing = {id(op) for op in self.forward.ops if operator_of(op).is_routing}
        for call in [call for call in self.calls if call[0] not in choosing]:
            del self.calls[call]

    def check(self, recorder: Recorder | Collector) -> Pack:
        """Each operator is asked after how many saved tensors it is met."""
        pack = recorder.pack()
        self.count_made = recorder.count_made
        return pack

    def gives_less(self, error: RuntimeError) -> bool:
        """Kept operators do not fit if the function did something only once, such as filling a cache."""
        self.is_off = self.is_off or isinstance(error, Slipped)
        return isinstance(error, Slipped)

    def held(self) -> list[Tensor]:
        """What is kept."""
        return [tensor for result, *_ in self.calls.values() for tensor in _tensors(result)]


class _Forward:
    """The context that forward runs under. The frame's hooks do not lead here: it goes when forward is over.

    Attributes:
        ops: the operators that it meets.
        count_wanted: how many calls it has met that are to be kept.
    """

    __slots__ = (
        *("_calls", "_counts", "_driver", "_random", "_run", "_saved", "_states", "_unneeded", "_wanted"),
        *("count_wanted", "ops"),
    )

    def __init__(
        self,
        wanted: Wanted,
        unneeded: set[Any],
        saved: Sequence[Any],
        calls: dict[Call, Kept],
        states: DrawnStates | None,
    ) -> None:
        self._wanted = {id(op): numbers for op, numbers in wanted.items()}
        self._random = {id(op) for op in wanted if states is not None and operator_of(op).is_random}
        self._unneeded, self._saved, self._calls, self._states = unneeded, saved, calls, states
        self.ops = frozenset(wanted)
        self._counts = dict.fromkeys(self._wanted, 0)
        self.count_wanted = 0
        self._run = current_run()
        self._driver = Interception(self.ops, self._meet)

    def __enter__(self) -> None:
        self._driver.enter()

    def __exit__(self, *error: object) -> None:
        self._driver.leave()
        del self._driver  # it leads back here

    def _meet(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and keep its result if it is wanted."""
        if not _is_grad_enabled() or current_run() is not self._run or is_cached_cast(op, args, kwargs):
            return op(*args, **kwargs)
        counts, key = self._counts, id(op)
        number = counts[key]
        counts[key] = number + 1
        is_copy = self._wanted[key].get(number)
        if is_copy is None:
            return op(*args, **kwargs)
        self.count_wanted += 1
        call = key, number
        result = self._run_drawing(call, op, args, kwargs) if key in self._random else op(*args, **kwargs)
        if call not in self._unneeded:
            kept = _map(copy_unseen if is_copy else quick_alias, result)
            self._calls[call] = (kept, _versions(kept), len(self._saved), is_copy)
        return result

    def _run_drawing(self, call: Call, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that may draw random numbers, and note where the generators stand afterwards."""
        sources = sources_of(tensors_in(args, kwargs), (*args, *kwargs.values()))
        before = read_states(sources)
        result = op(*args, **kwargs)
        moved = moved_states(before, read_states(sources))
        if moved is not None and self._states is not None:
            self._states[call] = moved
        return result


class _Mode(DispatchMode):
    """In place of an interception where somebody's dispatch mode is on, which must not see what is served."""

    steps_aside = True

    def __init__(self, ops: frozenset[Any], meet: Callable[..., Any]) -> None:
        super().__init__()
        self._ops, self._meet = ops, meet

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on what is looked for."""
        return self._meet(func, args, kwargs) if func in self._ops else func(*args, **kwargs)

    def enter(self) -> None:
        """Switch it on."""
        self.__enter__()

    def leave(self) -> None:
        """Switch it off."""
        self.__exit__(None, None, None)


def _map(fn: Callable[[Tensor], Tensor], result: Any) -> Any:
    if isinstance(result, Tensor):
        return fn(result)
    if isinstance(result, (tuple, list)):
        return type(result)([fn(part) if isinstance(part, Tensor) else part for part in result])
    return result


def _tensors(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


def _versions(result: Any) -> int | list[int]:
    if isinstance(result, Tensor):
        return result._version  # noqa: SLF001
    return [tensor._version for tensor in _tensors(result)]  # noqa: SLF001
