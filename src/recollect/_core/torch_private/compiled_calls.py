"""Compiled code that is called inside a region: for as long as it runs, our modes are off, as if they were not there.

Dynamo guards on what is around a call: on torch-function modes, which it would trace into the code, and on the
thread's dispatch keys; an interception sets one of these. Under either it would compile again, and flex attention, for
one, breaks then. A dispatch mode would see what the code runs inside, which does not concern a policy: it may be
replayed from a CUDA graph, where memory is used again. So a compiled function is one opaque call. It runs again, or is
kept as a part of a block.

Where torch is asked to show compiled code to modes (``torch._inductor.config.wrap_inductor_compiled_regions``),
dispatch modes stay on and meet each piece as one call, of the operator ``inductor_compiled_code``.

Private names: ``enter_exit_hooks`` of Dynamo's contexts, which it calls before it looks at guards and after the code
has run; ``_maybe_set_eval_frame``, the last thing that it calls, after it has put back dispatch keys (torch 2.13), also
where ``fullgraph=True`` has compiled nothing and it raises before it comes to the hooks; the stack of dispatch modes.
Would be replaced by: a public hook around each call of a compiled function.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from recollect._core.torch_private import intercept
from recollect._core.torch_private.ambient import FunctionMode, function_mode_depth, put_modes, read_modes
from recollect._core.torch_private.dispatch import DispatchMode, dispatch_mode_depth

_C = torch._C
_DYNAMO = "torch._dynamo.eval_frame"
_HOOKS = "enter_exit_hooks"
Modes = tuple[Any, ...]


_is_included: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_included
_include: Callable[[Any, bool], None] = _C._dispatch_tls_set_dispatch_key_included
_KEYS = (intercept.KEY, _C.DispatchKey.Python, _C.DispatchKey.PythonTLSSnapshot)
"""The keys that interceptions and dispatch modes set."""


class _Aside:
    """One call of compiled code that modes have stepped aside for."""

    __slots__ = ("frame", "has_begun", "step_back")

    def __init__(self, frame: FrameType | None, step_back: Callable[[], None]) -> None:
        self.frame, self.step_back, self.has_begun = frame, step_back, False


class _Due(threading.local):
    """Per thread: the keys to set once Dynamo has put back those that it found, and the calls that are not over."""

    keys: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.asides: list[_Aside] = []


_due = _Due()


def _nothing() -> None:
    """Put nothing back."""


def step_aside() -> Callable[[], None]:
    """Compiled code is called: switch off what of ours is on; gives the function that switches it on again."""
    is_intercepted = intercept.is_on()
    if not (is_intercepted or function_mode_depth() or dispatch_mode_depth()):
        return _nothing
    keys = tuple(filter(_is_included, _KEYS))
    functions, others = read_modes(ours=True), read_modes(ours=False)
    dispatching = _plain_dispatch_modes()
    staying = dispatching if _shows_compiled_code() else tuple(filter(_stays, dispatching))
    for mode in functions:
        if isinstance(mode, FunctionMode):
            mode.meet_compiled()
    _exchange(functions, others, put_modes)
    _exchange(dispatching, staying, _put_dispatch_modes)
    if is_intercepted:
        intercept.pause()

    def step_back() -> None:
        _due.asides.remove(aside)
        aside.frame = None  # it holds the call's arguments, and this function: a cycle
        _due.keys = keys
        if is_intercepted:
            intercept.resume()
        _exchange(staying, dispatching, _put_dispatch_modes)
        _exchange(others, functions, put_modes)

    frame = sys._getframe(1)
    aside = _Aside(frame.f_back if frame.f_code.co_name == "<listcomp>" else frame, step_back)
    _due.asides.append(aside)
    return step_back


def _exchange(modes: Modes, by: Modes, put: Callable[[Modes], None]) -> None:
    if len(modes) != len(by):
        put(by)


def _stays(mode: Any) -> bool:
    return not (isinstance(mode, DispatchMode) and mode.steps_aside)


def _shows_compiled_code() -> bool:
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(getattr(config, "wrap_inductor_compiled_regions", False))


def _plain_dispatch_modes() -> Modes:
    """The modes that are on, without torch's own, such as the one that makes tensors fake: these have other places."""
    return tuple(mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode())


def _put_dispatch_modes(modes: Modes) -> None:
    for _ in _plain_dispatch_modes():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


class _EnterExitHooks:
    """The hooks of a context of Dynamo: its own, made before or after this was installed, and ours, the first."""

    def __get__(self, context: Any, owner: type | None = None) -> Any:
        if context is None:
            return self
        hooks: list[Any] = vars(context)[_HOOKS]
        if not hooks or hooks[0] is not step_aside:
            hooks.insert(0, step_aside)
        return hooks

    def __set__(self, context: Any, hooks: list[Any]) -> None:
        vars(context)[_HOOKS] = hooks


def _install(dynamo: Any) -> None:
    setattr(dynamo._TorchDynamoContext, _HOOKS, _EnterExitHooks())
    set_callback = dynamo._maybe_set_eval_frame

    def set_callback_and_resume(callback: Any) -> Any:
        if _due.asides:
            _meet(sys._getframe(1))
        if _due.keys:
            for key in _due.keys:
                _include(key, True)  # noqa: FBT003
            _due.keys = ()
        return set_callback(callback)

    dynamo._maybe_set_eval_frame = set_callback_and_resume


def _meet(frame: FrameType) -> None:
    """Dynamo's call in this frame begins, or it ends: then step back, unless its hooks have done so."""
    aside = _due.asides[-1]
    if aside.frame is frame:
        if aside.has_begun:
            aside.step_back()
        aside.has_begun = True


class _AtImport:
    """Installs it when Dynamo is imported, which may be inside a region, under our modes."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of Dynamo, what others find, and when it has been executed, it is told of us."""
        if name != _DYNAMO or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                _install(module)

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


class _Once:
    """Installs it once in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_done = False

    def install(self) -> None:
        with self._lock:
            if not self.is_done:
                self.is_done = True
                if _DYNAMO in sys.modules:
                    _install(sys.modules[_DYNAMO])
                else:
                    sys.meta_path.insert(0, _AtImport())


_once = _Once()


def step_aside_for_compiled_code() -> None:
    """From now on, whatever mode of ours is on steps aside while compiled code runs, on its thread. Costs 40 ns."""
    if not _once.is_done:
        _once.install()
