"""What the current thread is doing: whether it recomputes, who watches it, and which settings hold around it.

All live in ContextVars that are set and read within one call on one thread. Recomputation runs in a copy of the
forward's context (`contextvars.Context`), so a nested region finds on recomputation the settings it found in forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from torch.compiler import is_dynamo_compiling

from recollect._core.argument_text import describe_argument

if TYPE_CHECKING:
    from typing import Self

P = ParamSpec("P")
T = TypeVar("T")

_run: ContextVar[object | None] = ContextVar("recollect_run", default=None)
_is_last: ContextVar[bool] = ContextVar("recollect_last_recomputation", default=False)


def is_recomputing() -> bool:
    """Whether a region is running this code again, in backward, to recompute what it dropped.

    In compiled code it is always False: recomputation is part of the graph there, and Python does not run again. Use it
    to keep a side effect (a counter, a log line, a metric) from happening twice.

    >>> import torch, recollect
    >>> calls = []
    >>> def f(x):
    ...     calls.append(recollect.is_recomputing())
    ...     return x.sin()
    >>> recollect.checkpoint(f)(torch.ones(2, requires_grad=True)).sum().backward()
    >>> calls
    [False, True]
    """
    return not is_dynamo_compiling() and _run.get() is not None


def mark_recomputing() -> None:
    """Say that this context recomputes; call it only inside a copied context, which then forgets it.

    Whoever watched forward does not watch this.
    """
    _run.set(object())
    if watcher.get() is not None:
        watcher.set(None)
    if _is_last.get():
        _is_last.set(False)


current_run = _run.get
"""What tells one recomputation from another, and from forward (None)."""


def mark_last() -> None:
    """Say that no recomputation of the same frame will follow; in a copied context, like `mark_recomputing`."""
    _is_last.set(True)


is_last_recomputation = _is_last.get
"""Whether what was kept for the running recomputation may go as it is used."""


class Watcher(Protocol):
    """Whoever runs a region under a policy: is told of the names that the function gives."""

    def call_named(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a named block, or give what was kept of it."""

    def see_named(self, name: str, value: Any) -> None:
        """A value was given a name."""


watcher: ContextVar[Watcher | None] = ContextVar("recollect_watcher", default=None)

_current_watcher = watcher.get


def region(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Name a function inside a model, so that policies can keep it whole and reports show it.

    Outside a checkpointed region, or if no policy mentions the name, the function just runs.

    Args:
        name: what `recollect.policies.save_names` and reports call it.

    >>> import torch, recollect
    >>> @recollect.region("attn")
    ... def attention(q, k, v):
    ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> def block(x):
    ...     return attention(x, x, x).sin()
    >>> x = torch.randn(1, 2, 8, 4, requires_grad=True)
    >>> keep = recollect.policies.save_names("attn")
    >>> recollect.checkpoint(block, policy=keep)(x).sum().backward()
    """
    _check_name("region", name)

    def transform(fn: Callable[P, T]) -> Callable[P, T]:
        if not callable(fn):
            message = f"recollect.region({name!r}) expects a function, not {describe_argument(fn)}: it is a decorator"
            raise TypeError(message)

        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            if is_dynamo_compiling():
                from recollect._core.torch_private.naming import call_named_in_graph

                traced: T = call_named_in_graph(name, fn, args, kwargs)
                return traced
            current = _current_watcher()
            if current is None:
                return fn(*args, **kwargs)
            result: T = current.call_named(name, fn, args, kwargs)
            return result

        named.__wrapped__ = fn  # type: ignore[attr-defined]
        if isinstance(fn, FunctionType):
            named.__name__, named.__qualname__ = fn.__name__, fn.__qualname__
            named.__module__, named.__doc__ = fn.__module__, fn.__doc__
        return named

    return transform


def name(value: T, name: str) -> T:
    """Name a tensor inside a model and return it, so that policies can keep it and reports show it.

    Args:
        value: a tensor made inside a region.
        name: what `recollect.policies.save_names` and reports call it.

    >>> import torch, recollect
    >>> def block(x):
    ...     q = recollect.name(x @ x, "q")
    ...     return q.sin().exp()
    >>> x = torch.randn(4, 4, requires_grad=True)
    >>> recollect.checkpoint(block, policy=recollect.policies.save_names("q"))(x).sum().backward()
    """
    _check_name("name", name)
    if is_dynamo_compiling():
        from recollect._core.torch_private.naming import name_in_graph

        traced: T = name_in_graph(value, name)  # type: ignore[arg-type]
        return traced
    current = _current_watcher()
    if current is not None:
        current.see_named(name, value)
    return value


def _check_name(function: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        message = f"recollect.{function} needs a name, a non-empty string, not {describe_argument(name)}"
        if isinstance(name, FunctionType):
            message += f": write @recollect.{function}({name.__name__!r})"
        raise TypeError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What context managers around a region say; None leaves the region's own option in force."""

    early_stop: bool | None = None
    explain: bool | None = None


_settings: ContextVar[Settings] = ContextVar("recollect_settings", default=Settings())  # noqa: B039 (frozen)

current_settings = _settings.get


class _Entered(threading.local):
    """Per thread: how to leave what this thread has entered."""

    def __init__(self) -> None:
        self.tokens: list[Token[Settings]] = []


class override:  # noqa: N801 (reads as a function: `with override(early_stop=False):`)
    """Change settings for the block, on this thread only; the innermost wins. Can be entered again, by any thread."""

    def __init__(self, **changes: bool | None) -> None:
        self._changes = changes
        self._entered = _Entered()

    def __enter__(self) -> Self:
        self._entered.tokens.append(_settings.set(replace(_settings.get(), **self._changes)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _settings.reset(self._entered.tokens.pop())
