"""What is around a region and decides what it computes: read at entry, put back for recomputation.

Autocast, torch-function modes (`torch.device` contexts among them), process-wide switches (SDPA kernels, default
dtype, matmul precision), the cache of parametrizations, and whatever the user registered. On recomputation nothing is
set that already stands as it stood, which is the usual case and costs 1 µs.
Dispatch modes are left alone: a mode around backward (a FLOP counter, say) sees the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from recollect._core.argument_text import short_repr
from recollect._core.registry import Registration, Registry
from recollect._core.torch_private.ambient import any_autocast_enabled, put_state, read_state
from recollect._recompute.rng import accelerator

Capture = Callable[[], Callable[[], AbstractContextManager[Any]] | None]
"""Reads a state at region entry; gives a maker of the context that sets it again, or None if there is none to set."""

_registered: Registry[Capture] = Registry()


def register_ambient(capture: Capture) -> Registration:
    """Carry your own global state from forward to recomputation, in every region of the process.

    `capture` is called when a region is entered. It returns None if there is nothing to carry, or else a function that
    is called at each recomputation and returns the context manager to recompute under. Use it for globals that decide
    what your modules compute: a precision recipe, a routing switch, the current task. Context variables (`contextvars`)
    are carried automatically.

    Args:
        capture: reads the state; must be cheap, it runs once per region call.

    Returns:
        A registration; its ``remove`` ends it.

    >>> import contextlib, torch, recollect
    >>> state = {"scale": 1.0}
    >>> @contextlib.contextmanager
    ... def scaled(value):
    ...     before, state["scale"] = state["scale"], value
    ...     try:
    ...         yield
    ...     finally:
    ...         state["scale"] = before
    >>> def carry_scale():
    ...     value = state["scale"]
    ...     return None if value == 1.0 else (lambda: scaled(value))
    >>> registration = recollect.register_ambient(carry_scale)
    >>> x = torch.ones(2, requires_grad=True)
    >>> with scaled(3.0):
    ...     y = recollect.checkpoint(lambda x: (x * state["scale"]).exp())(x)
    >>> y.sum().backward()
    >>> bool((x.grad == 3 * torch.ones(2).mul(3).exp()).all())
    True
    >>> registration.remove()
    """
    if not callable(capture):
        message = f"register_ambient expects a function, not {short_repr(capture)}"
        raise TypeError(message)
    return _registered.add(capture)


@functools.cache
def _autocast_kinds() -> tuple[str, ...]:
    found = accelerator()
    if found is None or not torch.amp.autocast_mode.is_autocast_available(found[0]):
        return ("cpu",)
    return ("cpu", found[0])


_DTYPES = {kind: torch.get_autocast_dtype(kind) for kind in _autocast_kinds()}  # while autocast is off

Autocast = tuple[Any, ...] | None


def _read_autocast() -> tuple[Any, ...]:
    """For each kind of device whether autocast is on and to which dtype, then its weight cache."""
    kinds = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()]
    return (*kinds, torch.is_autocast_cache_enabled())


def read_autocast() -> Autocast:
    """How autocast stands; None where it is off, which takes 50 ns to see."""
    return _read_autocast() if any_autocast_enabled() else None


def _put_autocast(state: Autocast) -> Callable[[], None]:
    """Set autocast so; gives what sets it back.

    By the switches themselves, not by contexts, because a replay does it for each of its calls: with one kind of device
    5.7 µs instead of 8.
    """
    before = _read_autocast()
    _set_autocast(state or (*((False, _DTYPES[kind]) for kind in _autocast_kinds()), True))
    torch.autocast_increment_nesting()

    def put_back() -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_autocast(before)

    return put_back


def _set_autocast(state: tuple[Any, ...]) -> None:
    *each, is_cached = state
    for kind, (is_enabled, dtype) in zip(_autocast_kinds(), each, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(is_cached)


def _call(capture: Capture) -> Callable[[], AbstractContextManager[Any]] | None:
    maker = capture()
    if maker is None or (callable(maker) and not hasattr(type(maker), "__enter__")):
        return maker
    message = (
        f"a function given to register_ambient returned {short_repr(maker)}: expected None, or a function without "
        "arguments that returns a context manager. A context manager can be entered once, and each recomputation needs "
        "one: return the function that makes it"
    )
    raise TypeError(message)


class Ambient:
    """The state around one execution of a region."""

    __slots__ = ("_autocast", "_makers", "_state")

    def __init__(self) -> None:
        self._autocast = _read_autocast() if any_autocast_enabled() else None
        self._state = read_state()
        captures = _registered.items
        self._makers = [maker for capture in captures if (maker := _call(capture)) is not None] if captures else None

    def restore(self) -> ExitStack | None:
        """Set what stands otherwise now; gives what puts it back, None if nothing had to be set."""
        autocast = _read_autocast() if any_autocast_enabled() else None
        now = read_state()
        is_same = now == self._state if now[0] is self._state[0] is None else False  # two caches never compare equal
        if is_same and autocast == self._autocast and not self._makers:
            return None
        stack = ExitStack()
        try:
            for maker in self._makers or ():
                stack.enter_context(maker())
            if autocast != self._autocast:
                stack.callback(_put_autocast(self._autocast))
            if not is_same:
                stack.callback(put_state(self._state))
        except BaseException:
            stack.close()
            raise
        return stack
