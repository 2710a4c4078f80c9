"""Notices every call of every module in eager code, without a hook.

Global module hooks would do, but torch.compile puts guards on them: code that was compiled without them is compiled
anew under them, and again for each hook that is registered; and torch warns of them at each call of a compiled module.
They also cost some microseconds for each call, since they take torch's short way around hooks away. Compiled code does
not look at ``_call_impl``.

Private names: ``nn.Module._call_impl``, ``torch._C._dynamo.eval_frame``.
Would be replaced by: global forward hooks that compiled code does not guard on.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

# Where torch.compile leaves calls of modules to eager code, it shall compile ours no more than torch's own: neither the
# wrapper nor, whatever they call, the methods of listeners.
_frames = torch._C._dynamo.eval_frame
_LEAVE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
_LEAVE_ALL = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


class Listener(Protocol):
    """Whoever is told of calls, on the thread that makes them."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """A module is called, two Python frames above this one or more. What it gives, `leave` is given."""

    def leave(self, entry: Any, /) -> None:
        """The call has returned or raised. Not called where `enter` gave None."""

    def fail(self, module: nn.Module, error: BaseException, /) -> None:
        """The call has raised, and whoever made it still runs. Must not raise."""


class Watch:
    """While started, a listener is told of calls of modules. Several watches may be started, and stop in any order."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._wrapper: Callable[..., Any] | None = None

    def start(self) -> None:
        """Begin to tell."""
        with _lock:
            listener = type(self._listener)
            for method in (listener.enter, listener.leave, listener.fail):
                _frames.set_code_exec_strategy(method.__code__, _LEAVE_ALL)
            self._wrapper = _wrap(nn.Module._call_impl, self._listener)
            _frames.set_code_exec_strategy(self._wrapper.__code__, _LEAVE)
            nn.Module._call_impl = self._wrapper  # type: ignore[method-assign]

    def stop(self) -> None:
        """Tell no more. What others have put over ours stays, and ours then only passes calls on."""
        with _lock:
            assert self._wrapper is not None
            vars(self._wrapper)["listener"] = self._wrapper = None
            while getattr(top := nn.Module._call_impl, "listener", top) is None:
                nn.Module._call_impl = vars(top)["beneath"]  # type: ignore[method-assign]


_lock = threading.Lock()


def _wrap(beneath: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or (told := about["listener"]) is None:
            return beneath(self, *args, **kwargs)
        entry = told.enter(self, args, kwargs)
        try:
            return beneath(self, *args, **kwargs)
        except BaseException as error:
            told.fail(self, error)
            raise
        finally:
            if entry is not None:
                told.leave(entry)

    about = vars(watched)
    about.update(listener=listener, beneath=beneath)
    return watched
