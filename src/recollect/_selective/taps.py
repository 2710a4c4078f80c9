"""Calls of certain modules and custom Functions, seen while a region runs, without any global hook.

`nn.Module.__call__` looks for ``_compiled_call_impl`` on the instance before it calls `forward` and its hooks. A tap
puts itself there for as long as a region runs that wants to see the module, and passes the call to its watcher; in a
subclass of `torch.autograd.Function` it stands in for ``apply``. Where nobody watches, as on another thread, the call
is the plain one. Not seen: an ``apply`` that was taken from its class before (``f = MyFunction.apply``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, ref

from torch import nn

from recollect._core.scope import watcher

_NAME = "_compiled_call_impl"
_current = watcher.get


class BlockWatcher(Protocol):
    """A watcher that wants to see calls of modules and Functions; `call` is the plain call."""

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def call_function(
        self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class Tap(Protocol):
    """Stands in one call while it is open.

    Attributes:
        depth: how many regions have opened it; counted by `open_taps` and `close_taps`, under the lock.
    """

    depth: int

    def open(self) -> None: ...
    def close(self) -> None: ...


class ModuleTap:
    """Stands in one module's call."""

    __slots__ = ("__weakref__", "_before", "_module", "depth")

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.depth = 0
        self._before: Callable[..., Any] | None = None

    def open(self) -> None:
        module = self._module()
        if module is not None:
            table = module.__dict__
            self._before = table.get(_NAME)
            table[_NAME] = self

    def close(self) -> None:
        module = self._module()
        table = {} if module is None else module.__dict__
        if table.get(_NAME) is self:
            if self._before is None:
                del table[_NAME]
            else:
                table[_NAME] = self._before
                self._before = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module is called."""
        module = self._module()
        assert module is not None
        call = self._before if self._before is not None else module._call_impl  # noqa: SLF001
        current = cast("BlockWatcher | None", _current())
        return call(*args, **kwargs) if current is None else current.call_module(module, call, args, kwargs)


class FunctionTap:
    """Stands in ``apply`` of one subclass of `torch.autograd.Function`."""

    __slots__ = ("__weakref__", "_before", "_function", "depth")

    def __init__(self, function: type) -> None:
        self._function = ref(function)
        self.depth = 0
        self._before: Any = None

    def open(self) -> None:
        function = self._function()
        if function is not None:
            self._before = vars(function).get("apply")
            function.apply = self  # type: ignore[attr-defined]

    def close(self) -> None:
        function = self._function()
        if function is not None:
            if self._before is None:
                del function.apply  # type: ignore[attr-defined]
            else:
                function.apply = self._before  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Function is applied."""
        function = self._function()
        assert function is not None
        plain: Any = function.__mro__[1] if self._before is None else None
        call = self._before.__get__(None, function) if plain is None else plain.apply.__func__.__get__(function)
        current = cast("BlockWatcher | None", _current())
        return call(*args, **kwargs) if current is None else current.call_function(function, call, args, kwargs)


_module_taps: WeakKeyDictionary[nn.Module, ModuleTap] = WeakKeyDictionary()
_function_taps: WeakKeyDictionary[type, FunctionTap] = WeakKeyDictionary()
_lock = threading.Lock()


def tap_module(module: nn.Module) -> ModuleTap:
    """The one tap of a module."""
    with _lock:
        if module not in _module_taps:
            _module_taps[module] = ModuleTap(module)
        return _module_taps[module]


def tap_function(function: type) -> FunctionTap:
    """The one tap of a subclass of `torch.autograd.Function`."""
    with _lock:
        if function not in _function_taps:
            _function_taps[function] = FunctionTap(function)
        return _function_taps[function]


def open_taps(taps: Sequence[Tap]) -> None:
    """Let the watcher of this thread see calls of these modules."""
    with _lock:
        for tap in taps:
            if tap.depth == 0:
                tap.open()
            tap.depth += 1


def close_taps(taps: Sequence[Tap]) -> None:
    """Take back what `open_taps` did."""
    with _lock:
        for tap in taps:
            tap.depth -= 1
            if tap.depth == 0:
                tap.close()
