"""Recomputes forgotten values by the program: on demand, each call once, each value held until its last user has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, cast

from torch import Tensor

from recollect._core.errors import ChangedInputError
from recollect._core.torch_private.engine import pop_hooks, push_hooks, set_grad_enabled
from recollect._recompute.hooks import same
from recollect._recompute.oplog import describe_tensor
from recollect._recompute.rng import put_back
from recollect._selective.program import NOWHERE, Bound, Call, Cast, Inner, Listed, Numbered, Program, SentValue, View

_DEEPEST = 32  # calls that wait for each other before they are made in order


class Replay:
    """The values of one backward pass over one execution.

    Args:
        region: its name.
        program: what to call for what.
        bound: what this execution has; emptied on the way if this is the last pass.
        leaves: the region's arguments, to be called with again.
        uses: how often each number is asked for until every slot that is alive is served.
        is_last: whether what is held may go with its last use.
        fill: called with the index and value of each inner saved tensor that a call makes.
    """

    __slots__ = (
        "_bound",
        "_depth",
        "_fill",
        "_inputs",
        "_is_last",
        "_program",
        "_region",
        "_uses",
        "_values",
        "_views",
    )

    def __init__(
        self,
        region: str,
        program: Program,
        bound: Bound,
        leaves: list[Any],
        uses: list[int],
        *,
        is_last: bool,
        fill: Callable[[int, Tensor], None],
    ) -> None:
        self._region, self._program, self._bound, self._uses = region, program, bound, uses
        self._is_last, self._fill, self._views = is_last, fill, program.views
        self._values: dict[int, Tensor] = {}
        self._depth = 0
        self._inputs = {number: leaves[index] for number, index in program.inputs.items() if uses[number]}

    def be_last(self) -> None:
        """No other replay will follow: what was kept goes with its last use."""
        if self._is_last:
            return
        self._is_last = True
        held = self._bound.held
        self._bound.held = [None if left <= 0 else value for value, left in zip(held, self._uses, strict=True)]

    def take(self, index: int) -> Tensor | None:
        """The value of a saved tensor by its index; None for an inner one, which was given to `fill`."""
        source = self._program.sources[index]
        if type(source) is int:
            return self._value(source)
        if type(source) is View:
            base = self._value(source.number)
            return base.as_strided(source.shape, source.stride, base.storage_offset() + source.steps)
        if type(source) is Cast:
            return source.make(self._value(source.number))
        assert type(source) is Inner
        self._call(source.call)
        return None

    def has(self, index: int) -> bool:
        """Whether a saved tensor is there, so that no call has to be made for it."""
        source = self._program.sources[index]
        if type(source) is Inner:
            return False
        number = source.number if isinstance(source, View | Cast) else cast("int", source)
        view = self._views[number]
        return self._has(number if view is None else view.number)

    def _value(self, number: int) -> Tensor:  # noqa: C901, PLR0912 (written out: it runs per value)
        """A tensor by its number, for one of its users."""
        view = self._views[number]
        if view is not None:
            base = self._value(view.number)
            return base.as_strided(view.shape, view.stride, base.storage_offset() + view.steps)
        uses = self._uses
        left = uses[number] = uses[number] - 1
        values = self._values
        value = values.get(number)
        if value is not None:
            if left <= 0:
                del values[number]
            return value
        bound = self._bound
        held: Tensor | SentValue | None = bound.held[number]
        if held is not None:
            if type(held) is SentValue:
                return self._fetch(number, held)
            if held._version != bound.versions[number]:  # noqa: SLF001
                self._refuse(number, held)
            if left <= 0 and self._is_last:
                bound.held[number] = None
            return held
        given: Tensor | None = self._inputs.get(number)
        if given is not None:
            if left <= 0:
                del self._inputs[number]
            return given
        index = self._program.makers[number]
        call = self._program.calls[index]
        self._depth += 1
        if self._depth > _DEEPEST:
            self._make_before(index)
        if call.is_simple and bound.arguments[index] is None:  # the usual case, written out
            result: Tensor = call.func(*[self._value(link) for link in call.links])
            if left > 0:
                values[number] = result
        else:
            self._call(index, number)
            result = values[number] if left > 0 else values.pop(number)
        self._depth -= 1
        return result

    def _fetch(self, number: int, sent: SentValue) -> Tensor:
        """A kept value that lives elsewhere: it comes once in each pass, and stays for its later users."""
        value = sent.fetch()
        if self._uses[number] > 0:
            self._values[number] = value
        if self._is_last:
            self._bound.held[number] = None
        return value

    def _make_before(self, index: int) -> None:
        """Make what a call needs, one after the other: a long chain would go too deep."""
        program, needed, waiting = self._program, set[int](), [index]
        while waiting:
            for link in program.calls[waiting.pop()].links:
                view = program.views[link]
                number = link if view is None else view.number
                maker = program.makers[number]
                if maker >= 0 and maker not in needed and not self._has(number):
                    needed.add(maker)
                    waiting.append(maker)
        for earlier in sorted(needed):
            if not all(number < 0 or self._has(number) for number in program.calls[earlier].outs):
                self._call(earlier)

    def _has(self, number: int) -> bool:
        return number in self._values or self._bound.held[number] is not None or number in self._inputs

    def _refuse(self, number: int, value: Tensor) -> None:
        if number in self._program.scratch:
            return
        maker = self._program.makers[number]
        what = "a parameter or another tensor that the function reads"
        if maker >= 0:
            what = f"the result of {self._program.calls[maker].place}, which is kept"
        message = (
            f"region '{self._region}': {what} ({describe_tensor(value)}), was changed in place after forward used "
            "it, so nothing can be recomputed from it.\n"
            "Use the out-of-place form of that operation, run backward first, or let the policy recompute this "
            "value."
        )
        raise ChangedInputError(message)

    def _call(self, index: int, wanted: int = NOWHERE) -> None:
        """Make one call again, and store those of its results that somebody will ask for, or that is wanted now."""
        call = self._program.calls[index]
        args, kwargs = self._arguments(index, call)
        if call.scratch or call.written != NOWHERE:
            self._copy_written(call, args, kwargs, self._bound.arguments[index])
        states = self._bound.states.get(index)
        if states is not None:
            now = [(source, source.read()) for source, _ in states]
            put_back(states)
        try:
            if call.needs_grad is not None:
                result = self._call_watched(index, call, args, kwargs)
            else:
                result = call.func(*args, **kwargs)
        finally:
            if states is not None:
                put_back(now)
        if call.is_single:
            number = call.outs[0]
            if number >= 0 and (number == wanted or self._uses[number] > 0):
                self._values[number] = result.detach() if result.requires_grad else result
            return
        made = [part for part in result if isinstance(part, Tensor)]
        for number, part in zip(call.outs, made, strict=True):
            if number != NOWHERE and (number == wanted or self._uses[number] > 0):
                self._values[number] = part.detach() if part.requires_grad else part

    def _copy_written(self, call: Call, args: list[Any], kwargs: dict[str, Any], stored: Any) -> None:
        """Give a call copies of statistics that it updates, and of what it overwrites if others will ask for that."""
        if call.is_general:
            for place, value in enumerate(stored[0]):
                if type(value) is Numbered and value in call.scratch:
                    args[place] = args[place].clone()
            for name, value in stored[1].items():
                if type(value) is Numbered and value in call.scratch:  # a flag is not a number, though True equals 1
                    kwargs[name] = kwargs[name].clone()
            return
        for place, number in call.tensors:
            is_shared = number == call.written and call.needs_grad is None and self._uses[number] > 0
            if is_shared or number in call.scratch:
                _change(call, args, kwargs, place, Tensor.clone)

    def _arguments(self, index: int, call: Call) -> tuple[list[Any], dict[str, Any]]:
        found = self._bound.arguments[index]
        if found is None:  # nothing but tensors
            return [self._value(number) for _, number in call.tensors], {}
        stored, kwargs = found
        if call.is_general:
            args = [self._argument(value) for value in stored]
            return args, {name: self._argument(value) for name, value in kwargs.items()}
        args = [None] * (call.size + len(call.names))
        for place, number in call.tensors:
            args[place] = self._value(number)
        for place, value in zip(call.others, stored, strict=True):
            args[place] = value
        if call.names:
            return args[: call.size], {**kwargs, **dict(zip(call.names, args[call.size :], strict=True))}
        return args, kwargs

    def _argument(self, value: Any) -> Any:
        if type(value) is Numbered:
            return self._value(value)
        if type(value) is Listed:
            return value.make([self._argument(item) for item in value.items])
        return value

    def _call_watched(self, index: int, call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call whose inner saved tensors are needed: with a graph, as in forward, and hooks that take them."""
        assert call.needs_grad is not None
        wanted = self._program.inner[index]
        made: dict[int, Tensor] = {}  # one for each tensor: a function may ask whether two arguments are one
        if call.is_general:
            flags = iter(call.needs_grad)
            args = [_tracked(value, flags, made) for value in args]
            kwargs = {name: _tracked(value, flags, made) for name, value in kwargs.items()}
        else:
            for (place, _), needs_grad in zip(call.tensors, call.needs_grad, strict=True):
                _change(call, args, kwargs, place, partial(_track, made=made, needs_grad=needs_grad))
        count = -1

        def collect(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if tensor.requires_grad and not tensor.is_leaf:
                tensor = tensor.detach()
            place = wanted.get(count)
            if place is not None:
                self._fill(place, tensor)
            return tensor

        push_hooks(collect, same)
        set_grad_enabled(True)
        try:
            for place, number in call.tensors if call.written != NOWHERE else ():
                if number == call.written:
                    _change(call, args, kwargs, place, Tensor.clone)  # a leaf cannot be overwritten
            return call.func(*args, **kwargs)
        finally:
            set_grad_enabled(False)
            pop_hooks()


_MAKES = frozenset({Replay.take.__code__, Replay._value.__code__, Replay._call.__code__})  # noqa: SLF001


def replay_here() -> tuple[str, str] | None:
    """The region whose replay makes the call that asks, and the line it was learned at; None where none does.

    Read off the stack, so that replays need not say it; for profilers, inside backward.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code not in _MAKES:
        frame = cast("FrameType", frame.f_back)
    if frame is None:
        return None
    replay, call = frame.f_locals["self"], frame.f_locals.get("call")
    return replay._region, "" if call is None else call.place.rpartition(", ")[2]  # noqa: SLF001


def _change(
    call: Call, args: list[Any], kwargs: dict[str, Any], place: int, change: Callable[[Tensor], Tensor]
) -> None:
    """Change one of the tensors among a call's arguments, by its place."""
    if place < call.size:
        args[place] = change(args[place])
    else:
        name = call.names[place - call.size]
        kwargs[name] = change(kwargs[name])


def _track(tensor: Tensor, made: dict[int, Tensor], *, needs_grad: bool) -> Tensor:
    """A tensor for a call that is watched, the same for each time it is an argument; parameters are as they are."""
    found = made.get(id(tensor))
    if found is None:
        # A view that was made without a graph calls itself a leaf that requires grad, and is none.
        is_ready = not needs_grad or (tensor.requires_grad and tensor.is_leaf and tensor._base is None)  # noqa: SLF001
        found = made[id(tensor)] = tensor if is_ready else tensor.detach().requires_grad_()
    return found


def _tracked(value: Any, flags: Iterator[bool], made: dict[int, Tensor]) -> Any:
    """An argument whose tensors require grad where these flags say so."""
    if isinstance(value, Tensor):
        return _track(value, made, needs_grad=next(flags))
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, list, tuple)) for item in value):
        return Listed(type(value), []).make([_tracked(item, flags, made) for item in value])
    return value
