"""Calls of certain modules and custom Functions, seen while a region runs, without any global hook.

`nn.Module.__call__` looks for ``_compiled_call_impl`` on the instance before it calls `forward` and its hooks. A
`ModuleCalls` stands there for as long as a region runs that wants to see the module, and passes the call to its
watcher; a `FunctionCalls` stands in for ``apply`` of a subclass of `torch.autograd.Function`. Where nobody watches, as
on another thread, the call is the plain one. Not seen: an ``apply`` that was taken from its class before
(``f = MyFunction.apply``).
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


class SeenCalls(Protocol):
    """Stands in one call while it is open.

    Attributes:
        depth: how many regions have opened it; counted by `begin_seeing` and `end_seeing`, under the lock.
    """

    depth: int

    def open(self) -> None: ...
    def close(self) -> None: ...


class ModuleCalls:
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


class FunctionCalls:
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


_of_modules: WeakKeyDictionary[nn.Module, ModuleCalls] = WeakKeyDictionary()
_of_functions: WeakKeyDictionary[type, FunctionCalls] = WeakKeyDictionary()
_lock = threading.Lock()


def calls_of_module(module: nn.Module) -> ModuleCalls:
    """The one object that stands in the calls of a module."""
    with _lock:
        if module not in _of_modules:
            _of_modules[module] = ModuleCalls(module)
        return _of_modules[module]


def calls_of_function(function: type) -> FunctionCalls:
    """The one object that stands in ``apply`` of a subclass of `torch.autograd.Function`."""
    with _lock:
        if function not in _of_functions:
            _of_functions[function] = FunctionCalls(function)
        return _of_functions[function]


def begin_seeing(seen: Sequence[SeenCalls]) -> None:
    """Let the watcher of this thread see calls of these modules."""
    with _lock:
        for calls in seen:
            if calls.depth == 0:
                calls.open()
            calls.depth += 1


def end_seeing(seen: Sequence[SeenCalls]) -> None:
    """Take back what `begin_seeing` did."""
    with _lock:
        for calls in seen:
            calls.depth -= 1
            if calls.depth == 0:
                calls.close()
