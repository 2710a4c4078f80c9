"""What the user wraps: entered before its function runs, left after it. An object, so that module hooks can drive it.

`run` is the whole of a checkpointed call; `Region` its two halves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from recollect._core.pytree import Arguments
from recollect._core.scope import current_settings
from recollect._core.torch_private.engine import pop_hooks, push_hooks, top_hooks
from recollect._core.torch_private.functorch import transforms_active
from recollect._core.torch_private.modes import any_function_mode, quietly, without_function_modes
from recollect._core.torch_private.pytree import is_container, tree_leaves
from recollect._recompute.frame import Frame, Inputs, Options, unpack
from recollect._recompute.functional import run_functional
from recollect._recompute.oplog import OpLog
from recollect._recompute.surroundings import Surroundings
from recollect._recompute.values import Evidence


def run(name: str, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function so that its saved tensors are forgotten and made again when backward asks.

    With grad mode off it is a plain call.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if transforms_active():
        return run_functional(name, options, fn, args, kwargs)
    region = Region(name, options, fn, args, kwargs)
    region.enter()
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        if not region.fail(error):
            raise
        message = f"region '{name}': the forward context of context_fn swallowed the exception of the function"
        raise RuntimeError(message) from error
    region.leave(result)
    return result


class Region:
    """One call of a checkpointed function, from `enter` to `leave` or `fail`; also a context manager."""

    __slots__ = ("_arguments", "_contexts", "_fn", "_frame", "_name", "_options")

    def __init__(
        self, name: str, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._name, self._options, self._fn = name, options, fn
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._frame: Frame | None = None
        self._contexts: list[AbstractContextManager[Any]] = []

    def enter(self) -> None:
        """Note what recomputation will need, and put the hooks in force. Leaves nothing behind if it raises."""
        if any_function_mode():
            with without_function_modes():
                pack = self._prepare()
        else:
            pack = self._prepare()
        push_hooks(pack, unpack)
        entered: list[AbstractContextManager[Any]] = []
        try:
            for context in self._contexts:
                context.__enter__()
                entered.append(context)
        except BaseException as error:
            self._contexts = entered
            self.fail(error)
            raise

    def _prepare(self) -> Callable[[Tensor], Any]:
        """Make the frame; gives its pack hook."""
        options, settings = self._options, current_settings()
        assert self._arguments is not None
        arguments = Arguments(*self._arguments)
        self._arguments = None
        frame = Frame(self._name, self._fn, options)
        frame.stops_early = options.early_stop if settings.early_stop is None else settings.early_stop
        around = frame.around = Surroundings(self._name, self._fn, arguments.leaves, options.preserve)
        frame.inputs = Inputs(arguments, top_hooks(True))  # noqa: FBT003
        if around.around_forward is not None:
            self._contexts.append(around.around_forward(self._name))
        if options.contexts is not None:
            forward, frame.recompute_context = _checked_contexts(self._name, options.contexts())
            self._contexts.append(forward)
        if options.explain if settings.explain is None else settings.explain:
            frame.log = OpLog(self._name)
            self._contexts.append(frame.log)
        pack: Callable[[Tensor], Any] = frame.pack()
        if options.matcher.values is not None or frame.log is not None:
            pack = _observed(frame, pack)
        self._frame = frame
        return quietly(pack) if around.ambient.has_modes else pack

    def leave(self, result: Any) -> None:
        """The function has returned: take the hooks away and keep only what recomputation will need."""
        frame = self._frame
        assert frame is not None
        self._frame = None
        try:
            for context in reversed(self._contexts):
                context.__exit__(None, None, None)
        finally:
            pop_hooks()
        if frame.evidence is not None:
            frame.evidence.flush()
        if any_function_mode():
            with without_function_modes():
                _close(frame, result)
        else:
            _close(frame, result)

    def fail(self, error: BaseException) -> bool:
        """The function has raised: take everything away. True if the forward context swallowed the exception."""
        self._frame = None
        swallowed = False
        try:
            for context in reversed(self._contexts):
                swallowed = bool(context.__exit__(type(error), error, error.__traceback__)) or swallowed
        finally:
            pop_hooks()
        return swallowed

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        else:
            self.leave(None)


def _close(frame: Frame, result: Any) -> None:
    frame.around.settle()
    assert frame.inputs is not None
    frame.inputs.settle()
    frame.is_open = False
    if frame.slots:
        _watch_outputs(frame, result)


def _checked_contexts(region: str, contexts: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    match contexts:
        case (forward, again) if hasattr(forward, "__enter__") and hasattr(again, "__enter__"):
            return forward, again
    message = f"region '{region}': context_fn must give two context managers, not {contexts!r}"
    raise TypeError(message)


def _observed(frame: Frame, inner: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The pack hook of a region that also keeps evidence of values, or a log."""
    check, log = frame.options.matcher.values, frame.log
    evidence = frame.evidence = Evidence(check) if check is not None else None

    def pack(tensor: Tensor) -> Any:
        if evidence is not None:
            evidence.note(tensor)
        if log is not None:
            log.note_saved(tensor)
        return inner(tensor)

    return pack


def _watch_outputs(frame: Frame, result: Any) -> None:
    """Find out how a backward pass will show that it reaches all of the region's saved tensors.

    With one differentiable output, the first saved tensor that is asked for shows it. With several, each output's
    node reports when a pass runs it.
    """
    if type(result) is Tensor:
        frame.outputs = 1
        return
    if not is_container(type(result)):
        return
    nodes = {leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    frame.outputs = len(nodes)
    if frame.outputs > 1:
        report = weakref.WeakMethod(frame.output_runs)
        for node in nodes:
            node.register_prehook(lambda gradients: reach(gradients) if (reach := report()) is not None else None)
