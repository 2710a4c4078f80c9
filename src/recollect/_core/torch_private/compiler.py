"""Keeps Dynamo out of the engine: what it must not trace runs as it is written. And what it was told to keep out of.

Private names: Dynamo's marks on code and functions, ``set_eval_frame``; of what compiles frames, its hooks, its backend
and how it is cloned with another.
Would be replaced by: a `torch.compiler.disable` that does not import all of torch._dynamo (about 2 s).
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame

F = TypeVar("F", bound=Callable[..., Any])
_BACKEND = "_torchdynamo_orig_backend"
_changed: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def untraced(fn: F) -> F:
    """The function, at which torch.compile breaks its graph to run it, and all that it calls, as written.

    Costs nothing: whether a frame is to be compiled is asked before it runs, of its code.
    """
    marks: Any = fn
    set_code_exec_strategy(marks.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return _break_at(fn)


def _break_at(fn: F) -> F:
    marks: Any = fn
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "a region of recollect"
    marks._torchdynamo_disable_recursive = True
    return fn


def untraced_around(fn: F) -> F:
    """The function, at which torch.compile breaks its graph, and which is given as `compiler` what compiles frames.

    It runs as written, and all that it calls, but for what it calls through `Compiling`.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return fn(*args, compiler=compiler, **kwargs)
        finally:
            set_eval_frame(compiler)

    return cast("F", _break_at(passed_by(call)))


class Compiling:
    """Calls a function with torch.compile at work, as it was when this was made: in recomputation, too."""

    def __init__(self, fn: Callable[..., Any], compiler: Any) -> None:
        self.__wrapped__ = fn
        self._compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        before = set_eval_frame(self._compiler)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            set_eval_frame(before)


def changed_backend(compiler: Any, key: Any, change: Callable[[Any], Any]) -> Any:
    """What compiles frames as another does, but by a changed backend; None where that only runs what is compiled.

    Args:
        compiler: what `untraced_around` gives.
        key: of two calls with one key the second gets what the first made.
        change: makes the backend.
    """
    convert: Any = getattr(compiler, _BACKEND, None)
    if not hasattr(convert, "_clone_with_backend"):
        return None
    made = _changed.setdefault(compiler, {})
    if key not in made:
        from torch._dynamo.convert_frame import catch_errors_wrapper

        changed = convert._clone_with_backend(change(getattr(convert, _BACKEND)))
        made[key] = catch_errors_wrapper(changed, compiler.hooks)
    return made[key]


def innermost_backend(backend: Any) -> Any:
    """The backend inside of torch's wrappers, by which torch tells whose compiled code it is."""
    while hasattr(backend, _BACKEND):
        backend = getattr(backend, _BACKEND)
    return backend


def passed_by(fn: F) -> F:
    """The function, marked so that torch.compile starts no graph at it; it may at what the function calls.

    For what stands before a function and changes its arguments. Traced code that calls it traces it as any other. But
    where the graph breaks deep inside, Python calls it, and Dynamo would begin a graph at its frame, too: Whisper was
    cut into eight graphs, and is cut into six.
    """
    marks: Any = fn
    set_code_exec_strategy(marks.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return fn


def passed_over(fn: F) -> F:
    """The same of a function that calls nothing of the user's: no graph starts at what it calls either.

    For the parts of what is passed by, which Dynamo sees one after the other. With ``dynamic=True`` it made a graph of
    the sizes of their arguments.
    """
    marks: Any = fn
    set_code_exec_strategy(marks.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def is_closed(kind: type) -> bool:
    """Whether Dynamo was told not to look into a class, by `torch.compiler.allow_in_graph`.

    Traced code can call its instances, and ask the class itself for nothing. diffusers does so to its blocks.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    return rules is not None and bool(rules.is_callable_allowed(kind))
