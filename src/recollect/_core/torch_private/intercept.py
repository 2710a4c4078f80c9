"""Lets a handler meet the calls of chosen operators, on this thread and for a while; all others pay nothing.

A dispatch mode sees every operator, at some microseconds each. Here kernels are registered for the chosen operators
alone, under a dispatch key that torch itself leaves unused (``Fake``: below autograd, above the kernels of devices),
with a fallthrough for all others; the key is switched on for a thread while a handler is entered. Where a dispatch mode
is on, or tensors are of a subclass, those come first: whoever looks on sees the call, and then so does the handler.

Registered kernels stay, one per operator and process, and do nothing while no handler is entered.

Private names: `torch._C._dispatch_key_parse`, the setters of a thread's included and excluded keys.
Would be replaced by: a dispatch mode that says which operators it wants to see.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

_NAME = "Fake"
KEY = torch._C._dispatch_key_parse(_NAME)
"""The dispatch key that is on for a thread while a handler is entered there."""
_include: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
_exclude: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded

Meet = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator, or gives what stands for its result."""


def _meet_nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


_Handler = tuple[frozenset[int], Meet]
"""Operators by their ids, which are hashed in C, and who meets them."""

_PAUSED: _Handler = (frozenset(), _meet_nothing)


class _Handlers(threading.local):
    """Per thread: who meets which operators, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Handler] = []


class _Kernels:
    """The kernels of this process, by operator; made when an operator is first chosen."""

    def __init__(self) -> None:
        self.handlers = _Handlers()
        self._lock = threading.Lock()
        self._libraries: dict[str, Library] = {}
        self._known: set[Any] = set()

    def ensure(self, ops: Iterable[OpOverload]) -> None:
        """Register kernels for operators that have none yet."""
        if self._known.issuperset(ops):
            return
        missing = [op for op in ops if op not in self._known]
        with self._lock:
            if not self._libraries:
                everything = self._libraries["_"] = Library("_", "IMPL")
                everything.fallback(fallthrough_kernel, _NAME)
            for op in missing:
                if op in self._known:
                    continue
                space = op.namespace
                if space not in self._libraries:
                    self._libraries[space] = Library(space, "IMPL")
                self._libraries[space].impl(op, _kernel_of(op, self.handlers), _NAME)
                self._known.add(op)


def _kernel_of(op: OpOverload, handlers: _Handlers) -> Callable[..., Any]:
    own = id(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _exclude(KEY, True)  # noqa: FBT003
        try:
            entered = handlers.entered
            if entered:
                met, meet = entered[-1]
                if own in met:
                    return meet(op, args, kwargs)
            return op(*args, **kwargs)
        finally:
            _exclude(KEY, False)  # noqa: FBT003

    return kernel


_kernels = _Kernels()


def can_intercept(func: Any) -> bool:
    """Whether calls of an operator can be met: it is one of the dispatcher's, with a schema."""
    return isinstance(func, OpOverload)


class Interception:
    """Lets `meet` run in place of these operators while entered, on the thread that entered it."""

    __slots__ = ("_meet", "_ops")

    def __init__(self, ops: frozenset[Any], meet: Meet) -> None:
        self._ops, self._meet = ops, meet

    def enter(self) -> None:
        """Switch it on."""
        _kernels.ensure(self._ops)
        _kernels.handlers.entered.append((frozenset(map(id, self._ops)), self._meet))
        _include(KEY, True)  # noqa: FBT003

    def leave(self) -> None:
        """Switch it off: what was entered before is on again."""
        entered = _kernels.handlers.entered
        entered.pop()
        if not entered or entered[-1] is _PAUSED:
            _include(KEY, False)  # noqa: FBT003


def is_on() -> bool:
    """Whether operators are met on this thread."""
    entered = _kernels.handlers.entered
    return bool(entered) and entered[-1] is not _PAUSED


def pause() -> None:
    """Meet nothing on this thread until `resume`, but for what is entered meanwhile."""
    _kernels.handlers.entered.append(_PAUSED)
    _include(KEY, False)  # noqa: FBT003


def resume() -> None:
    """Take back `pause`."""
    _kernels.handlers.entered.pop()
    _include(KEY, True)  # noqa: FBT003
