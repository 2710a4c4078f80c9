"""Which values the code of modules still has in variables when it returns, and its caller's meanwhile.

Autograd holds most of them anyway, so that the plain step does not show it; where a plan lets go of one, the variable
keeps it until the module's ``forward`` is over. So does a variable of the module that calls it: a loop over layers has
what the layer before gave in one until the next returns. Seen by a profile function of Python's, unless somebody else
has one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

_MOST = 64  # values of a collection that are looked at
_NEAR = 16  # frames between a module's code and that of the module which calls it


class Variables:
    """While started, tells of the tensors in variables of a module and its caller when it returns, on this thread."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._hook: Callable[[FrameType, str, Any], None] | None = None

    def start(self, note: Callable[[list[Tensor]], None]) -> None:
        """Begin to look, if nobody else does; `note` is called with the tensors, and held until `stop`."""
        if sys.getprofile() is None:
            self._hook = self._make_hook(note)
            sys.setprofile(self._hook)

    def stop(self) -> None:
        """Look no more."""
        self.pause()
        self._hook = None
        self._codes.clear()

    def pause(self) -> bool:
        """Look away for a while: each call of Python costs time under a hook. False if nobody looks on this thread."""
        is_on = self._hook is not None and sys.getprofile() is self._hook
        if is_on:
            sys.setprofile(None)
        return is_on

    def resume(self) -> None:
        """Look again."""
        sys.setprofile(self._hook)

    def watch(self, module: nn.Module) -> None:
        """A module is called: look at its code from now on."""
        forward = getattr(type(module), "forward", None)  # that of TorchScript cannot be read from the class
        code = getattr(forward, "__code__", None)
        if code is not None:
            self._codes.add(code)

    def _make_hook(self, note: Callable[[list[Tensor]], None]) -> Callable[[FrameType, str, Any], None]:
        """A closure, written out: it runs at every call and return."""
        codes = self._codes

        def hear(frame: FrameType, event: str, _: Any) -> None:
            if event == "return" and frame.f_code in codes:
                note([*_find_tensors(frame.f_locals.values()), *_find_in_caller(frame, codes)])

        return hear


def _find_in_caller(frame: FrameType, codes: set[CodeType]) -> list[Tensor]:
    """The tensors in variables of the module that has called this one."""
    caller = frame.f_back
    for _ in range(_NEAR):
        if caller is None or caller.f_code in codes:
            break
        caller = caller.f_back
    if caller is None or caller.f_code not in codes or not caller.f_code.co_flags & inspect.CO_OPTIMIZED:
        return []
    variables = caller.f_locals
    found = list(_find_tensors(variables.values()))
    if type(variables) is dict:  # before Python 3.13 the frame holds this copy of its variables, and all that is in it
        variables.clear()
    return found


def _find_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in collections of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list, dict) and len(value) <= _MOST:
            parts = value.values() if type(value) is dict else value
            yield from (part for part in parts if isinstance(part, Tensor))
