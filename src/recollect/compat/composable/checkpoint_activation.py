"""`checkpoint` for a module as it stands: each call of it becomes a region, by a hook before and a hook after it."""

from __future__ import annotations

import copy
from sys import _getframe
from typing import Any, Self

from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from recollect._apply.function import name_of
from recollect._apply.options import Choices
from recollect._core.torch_private.compiler import untraced
from recollect._recompute.frame import Frame
from recollect._recompute.way import Options
from recollect.compat.checkpoint import ContextFn, parse_options
from recollect.compat.composable.calls import after_forward, before_forward, innermost_frame
from recollect.compat.composable.contract import contract
from recollect.compat.composable.graphs import GraphStandIn


class CheckpointState:
    """What a checkpointed module carries.

    Attributes:
        enable_hook: whether calls of the module are regions; set it to False to have plain calls.
    """

    options: Options

    def __init__(self) -> None:
        self.enable_hook = False
        # Pickled along, because a handle that is loaded keeps its number from being given to another hook.
        self.handles: tuple[Any, ...] = ()

    @property
    def _ac_generator(self) -> Frame | None:
        """The call that is under way on this thread, the innermost if there are several; torch's name."""
        return innermost_frame(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)()
        vars(copied).update(vars(self))
        copied.handles = copy.deepcopy(self.handles, memo)
        return copied  # the same options: a copy of a model shares its owner's context_fn


@contract(CheckpointState)
def checkpoint(
    module: nn.Module,
    /,
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **unknown: Any,
) -> nn.Module:
    """Make each call of a module drop its activations until backward; class, names and structure stay the same.

    The region lies between the module's hooks: hooks registered before this call run outside of it, later ones inside.
    Recomputation calls the module once more, with all of its other hooks and with the original arguments of its
    forward. With grad mode off, and if you call ``module.forward`` directly, the call is plain. The module can be
    copied and pickled. ``checkpoint.state(module)`` returns its state.

    If a call ends with a `KeyboardInterrupt` or another exception that is not an `Exception`, torch runs no hooks. The
    region then ends when the traceback is freed, or at the thread's next call of a checkpointed module; until then, do
    not run backward on anything that the thread computes with grad mode on.

    Args:
        module: the module.
        use_reentrant: must be False.
        preserve_rng_state: draw the same random numbers again.
        context_fn: returns two context managers, one around forward and one around recomputation.
        determinism_check: ``"default"`` compares shape, dtype and device of each recomputed tensor, ``"none"`` nothing.
        debug: on a mismatch, show the operators of forward and of recomputation.
        early_stop: stop recomputation as soon as backward has everything it needs.
        unknown: there are no other options.

    Raises:
        ValueError: an option is unknown or has an invalid value.
        NotImplementedError: ``use_reentrant=True``.
        AssertionError: the module is already checkpointed.
        TransformError: when the module is called inside a ``torch.func`` transform with grad mode on.

    >>> import torch
    >>> from recollect.compat.composable import checkpoint
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    >>> _ = checkpoint(model[1])
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> checkpoint(model, retain=True)
    Traceback (most recent call last):
    ...
    ValueError: unexpected keyword arguments: retain; expected preserve_rng_state, context_fn, determinism_check, ...
    """
    if use_reentrant:
        message = (
            "use_reentrant=True is not supported in composable checkpoint: the reentrant engine runs its function "
            "itself, and hooks have no function to give it.\n"
            "Use recollect.compat.checkpoint_wrapper, or leave use_reentrant out."
        )
        raise NotImplementedError(message)
    if unknown:
        message = (
            f"unexpected keyword arguments: {', '.join(sorted(unknown))}; expected preserve_rng_state, context_fn, "
            "determinism_check, debug or early_stop"
        )
        raise ValueError(message)
    state = checkpoint.state(module)
    state.options = parse_options(
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
    )
    state.enable_hook = True
    state.handles = (
        module.register_forward_pre_hook(_before, with_kwargs=True),
        module.register_forward_hook(_after, prepend=True, always_call=True),
    )
    GraphStandIn(module, name_of(module), Choices(options=state.options)).put()
    return module


# Functions of a module, not closures: so they are pickled by name, and copies of a module share them.
def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    is_traced = is_dynamo_compiling() or is_exporting()
    if is_traced and "forward" in vars(module):  # loaded from a file, it has none, and the graph breaks
        return None
    return _before_eager(module, args, kwargs)


def _after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    if is_dynamo_compiling() or (is_exporting() and "forward" in vars(module)):
        return
    _after_eager(module, args, result)


@untraced
def _before_eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    state = checkpoint.state(module)
    options = state.options if state is not None and state.enable_hook else None
    return before_forward(_getframe(2), module, args, kwargs, state, options)


@untraced
def _after_eager(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    del module, args
    after_forward(_getframe(2), result)
