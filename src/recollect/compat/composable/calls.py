"""Calls of checkpointed modules that are under way on a thread, kept by the hooks before and after each forward.

torch runs a module's hooks around its ``forward``, and the one after it also when an `Exception` was raised. What it
does not do is to tell the two hooks of one call from those of another, where a module calls itself; or to call any hook
after a `KeyboardInterrupt`. So each call is known by the Python frame that runs it, and an object that lives as long as
the call's local variables clears up after one that was interrupted.
"""

from __future__ import annotations

import sys
import threading
from _thread import get_ident
from types import FrameType
from typing import Any, Self
from weakref import ref

import torch
from torch import nn

from recollect._apply.caches import cache_classes, without_cache
from recollect._apply.function import name_of
from recollect._core.errors import ChangedInputError, CheckpointError, TransformError
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.engine import pop_hooks, push_hooks, top_hooks
from recollect._core.torch_private.functorch import transforms_active
from recollect._core.torch_private.modules import call_of_hook, is_after_exception, is_running
from recollect._recompute.frame import Frame
from recollect._recompute.handles import frame_of
from recollect._recompute.hooks import same
from recollect._recompute.region import Region
from recollect._recompute.way import Options


class _Open(threading.local):
    """Per thread: the calls under way, outermost first."""

    def __init__(self) -> None:
        self.calls: list[_Call | _Rerun] = []


_open = _Open()


class _Call:
    """One call of a checkpointed module in forward."""

    __slots__ = ("frame", "id", "owner", "thread")

    def __init__(self, owner: object, call: FrameType, frame: Frame) -> None:
        self.owner = owner
        self.id: FrameType | None = call
        self.frame: Frame | None = frame
        self.thread = get_ident()

    def end(self, caller: FrameType, result: Any) -> None:
        """The forward hook was called."""
        _open.calls.pop()
        frame = self._close()
        if is_after_exception(caller):
            error = sys.exception()
            assert error is not None
            frame.fail(error)  # if the user's context swallows it: it is on its way, and torch raises it again
        else:
            frame.leave(result)

    def abandon(self) -> None:
        """No hook was called: take away what the region left in force."""
        frame = self._close()
        error = CheckpointError(f"region '{frame.name}' was left by an exception that runs no hooks")
        above = []
        while (hooks := top_hooks(True)) is not None and frame_of(hooks[0]) is not frame:
            above.append(hooks)
            pop_hooks()
        # Who is outside of the call and left after it took our saved-tensor hooks for theirs; then theirs are to go.
        is_taken = hooks is None
        if is_taken and not above:
            push_hooks(same, same)
        if not is_taken:
            frame.fail(error)
        for pair in reversed(above):
            push_hooks(*pair)
        if is_taken:
            frame.fail(error)

    def _close(self) -> Frame:
        frame = self.frame
        assert frame is not None
        self.frame = self.id = None
        return frame


class _Guard(tuple[Any, ...]):
    """What the pre-hook returns, for the call to hold in a local variable: dies with the call, however that ends."""

    call: _Call | None = None

    def __del__(self) -> None:
        call = self.call
        if call is not None and call.id is not None and call.thread == get_ident() and not is_running(call.id):
            _abandon_from(_open.calls.index(call))

    @classmethod
    def over(cls, arguments: tuple[Any, Any], call: _Call) -> Self:
        """These arguments, and what to clear up."""
        guard = cls(arguments)
        guard.call = call
        return guard


# In recomputation arguments that require grad are leaves, into which torch lets nobody write.
_WRITES_INTO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"


class _Again:
    """A region's function: calls the module once more, whose hooks then make no region of it."""

    __slots__ = ("__wrapped__", "frame")  # `__wrapped__`: where the engine looks for modules

    def __init__(self, module: nn.Module) -> None:
        self.__wrapped__ = module
        self.frame: ref[Frame] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rerun = _Rerun(self, args, kwargs)
        try:
            return self.__wrapped__(*args, **kwargs)
        except RuntimeError as error:
            if _WRITES_INTO_LEAF not in str(error):
                raise
            message = (
                f"region '{name_of(self.__wrapped__)}': in recomputation the module changes an argument in place, "
                "which it did not do in forward.\nIt read something that changed in between."
            )
            raise ChangedInputError(message) from error
        finally:
            rerun.close()


class _Rerun:
    """One call of a checkpointed module in recomputation.

    What the module's other hooks compute before and after its region was not the region's in forward: it is kept from
    it here, and so are arguments that they change once more, and random numbers that they draw.
    """

    __slots__ = ("_again", "_arguments", "_is_apart", "id")

    def __init__(self, again: _Again, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._again = again
        self._arguments: tuple[Any, Any] | None = (args, kwargs)
        self.id: FrameType | None = None
        _open.calls.append(self)
        self._is_apart = True
        push_hooks(same, same)

    def awaits(self, module: nn.Module) -> bool:
        """Whether this module is about to be called."""
        return self._arguments is not None and self._again.__wrapped__ is module

    def begin(self, call: FrameType) -> tuple[Any, Any] | None:
        """The pre-hook was called: here the region begins; gives its arguments."""
        self.id = call
        self._is_apart = False
        pop_hooks()
        frame = None if self._again.frame is None else self._again.frame()
        if frame is not None and not frame.around.is_captured:
            for source, state in frame.around.moved_states():
                source.write(state)
        arguments, self._arguments = self._arguments, None
        return arguments

    def end(self, _caller: FrameType, _result: Any) -> None:
        """The forward hook was called: here the region ends."""
        self.id = None
        self._is_apart = True
        push_hooks(same, same)

    def close(self) -> None:
        """The module has returned or raised."""
        _abandon_from(_open.calls.index(self) + 1)
        _open.calls.pop()
        if self._is_apart:
            pop_hooks()


def before_forward(
    caller: FrameType,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    owner: object,
    options: Options | None,
) -> tuple[Any, Any] | None:
    """The pre-hook: begin a region, or its recomputation; gives the arguments of forward, or None for those it has.

    Args:
        caller: the Python frame that called the hook.
        module: the module.
        args: as the module is called.
        kwargs: as the module is called.
        owner: what `innermost_frame` is asked with.
        options: of the region; None for a plain call.

    Raises:
        TransformError: a ``torch.func`` transform is active.
    """
    calls = _open.calls
    if calls:
        last = calls[-1]
        if isinstance(last, _Rerun) and last.awaits(module):
            return last.begin(call_of_hook(caller))
        _abandon_interrupted()
    if options is None or not torch.is_grad_enabled():
        return None
    if transforms_active():
        message = (
            f"region '{name_of(module)}': composable checkpoint works through hooks, which cannot hand the module "
            "to a torch.func transform.\n"
            "Inside transforms use recollect.compat.checkpoint or checkpoint_wrapper, or set "
            "checkpoint.state(module).enable_hook = False for plain calls."
        )
        raise TransformError(message)
    args, kwargs = without_cache(module, cache_classes(), args, kwargs)
    again = _Again(module)
    frame = Region(name_of(module), again, options).enter(args, kwargs)
    again.frame = ref(frame)
    if "torch._dynamo" in sys.modules and (hooks := top_hooks(True)) is not None:
        untraced(hooks[0])  # forward may be compiled code, which would be for compiling our hook too
    call = _Call(owner, call_of_hook(caller), frame)
    calls.append(call)
    return _Guard.over((args, kwargs), call)


def after_forward(caller: FrameType, result: Any) -> None:
    """The always-called forward hook: end the region, or its recomputation, if this call is one."""
    calls = _open.calls
    if not calls:
        return
    id_ = call_of_hook(caller)
    place = next((place for place in reversed(range(len(calls))) if calls[place].id is id_), None)
    if place is None:
        return  # a plain call, or one whose pre-hook was not reached
    _abandon_from(place + 1)  # interrupted, and forward went on
    calls[place].end(caller, result)


def innermost_frame(owner: object) -> Frame | None:
    """The region under way on this thread that belongs to this owner; the innermost if there are several."""
    calls = reversed(_open.calls)
    return next((call.frame for call in calls if isinstance(call, _Call) and call.owner is owner), None)


def _abandon_interrupted() -> None:
    """Clear up after calls that ended without their forward hook."""
    calls = _open.calls
    while calls and isinstance(calls[-1], _Call) and calls[-1].id is not None and not is_running(calls[-1].id):
        _abandon_from(len(calls) - 1)


def _abandon_from(place: int) -> None:
    """Clear up after this call and those inside of it, innermost first."""
    calls = _open.calls
    while len(calls) > place:
        call = calls.pop()
        assert isinstance(call, _Call), "a recomputation ends with its caller"
        call.abandon()
