"""`checkpoint` with torch's signature, and the context managers that go with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.compiler import is_dynamo_compiling, is_exporting

from recollect._apply.function import name_of
from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.patterns import hint_nearest, quote_all
from recollect._core.scope import override
from recollect._policy.base import Policy
from recollect._recompute.match import Matcher
from recollect._recompute.reentrant import CheckpointFunction
from recollect._recompute.region import Region
from recollect._recompute.rng import parse_preserve
from recollect._recompute.way import Options

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_CHECKS = {"default": Matcher(), "none": Matcher(metadata=False)}


def noop_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The default of ``context_fn``: two contexts that do nothing.

    >>> forward, recomputation = noop_context_fn()
    >>> with forward, recomputation:
    ...     pass
    """
    return nullcontext(), nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function and drop its activations until backward recomputes them; torch's signature.

    In compiled code the region is part of the graph: both engines do the same there, random numbers are always
    preserved, `determinism_check`, `debug` and `early_stop` have no effect, and `context_fn` must come from a policy.

    With ``use_reentrant=True`` nothing is compared, recomputation never stops early, and there are no operator logs.

    Args:
        function: what to run.
        args: its positional arguments.
        use_reentrant: which engine to use; always pass it. None warns and means True, as in torch.
        context_fn: returns two context managers, one around forward and one around recomputation.
        determinism_check: ``"default"`` compares shape, dtype and device of each recomputed tensor, ``"none"`` nothing.
        debug: on a mismatch, show the operators of forward and of recomputation.
        early_stop: stop recomputation as soon as backward has everything it needs.
        kwargs: ``preserve_rng_state`` (default True); with ``use_reentrant=False``, the function's own keyword
            arguments too.

    Raises:
        ValueError: an option has an invalid value, or cannot be combined with another.
        TypeError: `function` or `context_fn` cannot be called.

    >>> import torch
    >>> from recollect.compat import checkpoint
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    >>> bool((x.grad == x.cos()).all())
    True
    """
    if is_dynamo_compiling() or is_exporting():
        from recollect._apply.in_graph import call_in_graph

        kwargs.pop("preserve_rng_state", True)
        contexts = None if context_fn is noop_context_fn else context_fn
        return call_in_graph("checkpoint", function, None, args, kwargs, contexts)
    if not callable(function):
        message = f"checkpoint expects a function or module first, not {describe_argument(function)}"
        raise TypeError(message)
    if use_reentrant is None:
        warnings.warn(
            "checkpoint was called without use_reentrant: True is assumed, as in torch. Pass use_reentrant=False, "
            "which has fewer limits, or use_reentrant=True to keep this behaviour.",
            stacklevel=2,
        )
        use_reentrant = True
    options = parse_options(
        preserve_rng_state=kwargs.pop("preserve_rng_state", True),
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
    )
    if use_reentrant:
        if kwargs:
            message = f"unexpected keyword arguments with use_reentrant=True: {', '.join(sorted(kwargs))}; "
            message += "pass them by position, or use use_reentrant=False"
            raise ValueError(message)
        if context_fn is not noop_context_fn or debug is not False:
            message = "context_fn and debug need use_reentrant=False"
            raise ValueError(message)
        return CheckpointFunction.apply(function, bool(options.preserve), *args)  # type: ignore[no-untyped-call]
    return Region(name_of(function), function, options).call(args, kwargs)


def parse_options(
    *, preserve_rng_state: bool, context_fn: ContextFn | None, determinism_check: str, debug: bool, early_stop: bool
) -> Options:
    """Check a caller's options, named as torch names them.

    Raises:
        ValueError: `determinism_check` has a value that it cannot have.
    """
    if isinstance(context_fn, Policy) or (context_fn is not None and not callable(context_fn)):
        hint = f": write recollect.checkpoint(fn, policy={context_fn})" if isinstance(context_fn, Policy) else ""
        message = f"context_fn={short_repr(context_fn)}: expected a function that returns two context managers{hint}"
        raise TypeError(message)
    return Options(
        preserve=parse_preserve(bool(preserve_rng_state)),
        early_stop=early_stop,
        matcher=_parse_check(determinism_check),
        contexts=None if context_fn is noop_context_fn else context_fn,
        explain=debug,
        counts_runs=True,
    )


def _parse_check(determinism_check: str) -> Matcher:
    matcher = _CHECKS.get(determinism_check)
    if matcher is None:
        message = f"determinism_check={determinism_check!r}: expected one of {quote_all(_CHECKS)}"
        message += hint_nearest(determinism_check, _CHECKS)
        raise ValueError(message)
    return matcher


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager[Any]:
    """Set whether recomputation stops early, for all regions called inside.

    It overrides the argument `early_stop`; the innermost block wins.

    >>> import torch
    >>> from recollect.compat import checkpoint, set_checkpoint_early_stop
    >>> x = torch.ones(2, requires_grad=True)
    >>> with set_checkpoint_early_stop(False):
    ...     y = checkpoint(torch.sin, x, use_reentrant=False)
    >>> y.sum().backward()
    """
    return nullcontext() if is_dynamo_compiling() else override(early_stop=enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager[Any]:
    """Set whether mismatches show both operator logs, for all regions called inside; None leaves it to ``debug=``.

    >>> from recollect.compat import set_checkpoint_debug_enabled
    >>> with set_checkpoint_debug_enabled(True):
    ...     pass
    """
    return nullcontext() if is_dynamo_compiling() else override(explain=enabled)
