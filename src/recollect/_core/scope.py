"""What the current thread is doing: whether it recomputes, and which settings hold around it.

Both live in ContextVars that are set and read within one call on one thread. Recomputation runs in a copy of the
forward's context (`contextvars.Context`), so a nested region finds on recomputation the settings it found in forward.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

_recomputing: ContextVar[bool] = ContextVar("recollect_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the code that asks is being re-run by a region, in backward, to make forgotten tensors again.

    Use it to keep a side effect (a counter, a log line, a metric) from happening twice.

    >>> import torch, recollect
    >>> calls = []
    >>> def f(x):
    ...     calls.append(recollect.is_recomputing())
    ...     return x.sin()
    >>> recollect.checkpoint(f)(torch.ones(2, requires_grad=True)).sum().backward()
    >>> calls
    [False, True]
    """
    return _recomputing.get()


def mark_recomputing() -> None:
    """Say that this context recomputes; call it only inside a copied context, which then forgets it."""
    _recomputing.set(True)


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
