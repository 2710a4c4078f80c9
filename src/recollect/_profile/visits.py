"""Which modules were called between two operators: so that two calls of a module in a row are told apart.

Whoever looks at their variables, or at what they are given, is told of them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recollect._core.torch_private.calls import Watch
from recollect._profile.variables import Variables

Receive = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class Visits:
    """While started, notes the modules that are called, on all threads. Holds no module alive."""

    def __init__(self) -> None:
        self.variables: Variables | None = None
        self._receive: Receive | None = None
        self._entered: list[int] = []
        self._watch = Watch(self)

    def start(self, receive: Receive | None = None) -> None:
        """Begin to note; `receive` is called with each call's arguments, and held until `stop`."""
        self._receive = receive
        self._watch.start()

    def stop(self) -> None:
        """Note no more."""
        self._watch.stop()
        self._receive = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        self._entered.append(id(module))
        if self.variables is not None:
            self.variables.watch(module)
        if self._receive is not None:
            self._receive(module, args, kwargs)

    def leave(self, entry: Any) -> None:
        """Never called: nothing is noted of the end of a call."""

    def fail(self, module: nn.Module, error: BaseException) -> None:
        """A call has raised, which says nothing."""

    def take(self) -> list[int]:
        """The ids of the modules that were called since the last time, the outermost call first."""
        entered, self._entered = self._entered, []
        return entered
