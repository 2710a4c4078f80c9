"""Follows the names that `recollect.region` gives, while a step is profiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn


class Scopes:
    """Watches where no region watches for itself."""

    def __init__(self) -> None:
        self._local = threading.local()

    def now(self) -> tuple[str, ...]:
        """The names around the code that runs, outermost first."""
        names: tuple[str, ...] = getattr(self._local, "names", ())
        return names

    def call_named(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a named block."""
        before = self.now()
        self._local.names = (*before, name)
        try:
            return fn(*args, **kwargs)
        finally:
            self._local.names = before

    def see_named(self, name: str, value: Any) -> None:
        """A value was given a name: nothing here goes by it."""

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module is called that a region elsewhere watches."""
        del module
        return call(*args, **kwargs)

    def call_function(
        self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A Function is applied that a region elsewhere watches."""
        del function
        return call(*args, **kwargs)
