"""An entry in a module's dictionary that stands before the class's ``forward``: put there, taken away, copied.

torch finds it before the class's own ``forward``, and within all hooks of the module, whoever registered them and when.
Class, names and state_dict do not show it. Two more entries answer those who copy or pickle the module. See
docs/design/models.md.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, Self
from weakref import ref

from torch import nn

from recollect._apply.forwards import forward_of
from recollect._core.torch_private.compiler import is_closed, passed_over

_NAME = "forward"
_DEEPEST = 16  # forwards over forwards
_STATE = 2  # its place in what `__reduce_ex__` gives
# What readers of a function ask it for. Not what it is bound to: who unbinds it would leave the entry out.
_PASSED_ON = frozenset({"__name__", "__qualname__", "__annotations__", "__doc__", "__code__", "__globals__"})


class InstanceForward(ABC):
    """Called in place of a module's own ``forward``; holds the module weakly, so that no cycle arises.

    A deep copy of the module has an entry of its own; a shallow copy and a pickled module are plain. An entry that
    someone has covered by a ``forward`` of theirs cannot be taken away; removed, it passes calls on as they are.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = ref(module)
        self._covered: Callable[..., Any] | None = vars(module).get(_NAME)
        self.name = name
        self.is_removed = False
        self._is_static = isinstance(forward_of(type(module)), staticmethod)
        # Traced code asks the class, of which users may have changed it; a closed one it cannot ask.
        self._forward: Any = type(module).forward if is_closed(type(module)) else None
        self._replaced = self._find_replaced(module)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""

    @passed_over
    def _own_in_graph(self, module: Any) -> Callable[..., Any]:
        """What it stands for, as Dynamo can trace it: it binds no methods."""
        if self._covered is not None:
            return self._covered
        forward = type(module).forward if self._forward is None else self._forward
        return forward if self._is_static else functools.partial(forward, module)

    @abstractmethod
    def _for_copy(self, copied: nn.Module) -> Self:
        """The same for a deep copy of the module."""

    def _entries(self) -> dict[str, Any]:
        """What it puts into the module; made anew each time, because held it would hold this object."""
        return {_NAME: self, "__deepcopy__": self._copy_module, "__reduce_ex__": self._reduce_module}

    def put(self) -> None:
        """Stand in the module."""
        vars(self._owner()).update(self._entries())

    def take_away(self) -> None:
        """Undo `put`; once is enough."""
        self.is_removed = True
        module = self._module()
        if module is not None:
            self._leave(module)

    def put_again(self) -> None:
        """Undo `take_away`, over whatever stands in the module by now."""
        module = self._owner()
        self.is_removed = False
        if self not in entries_of(module):  # one that somebody has covered is still there
            self._covered, self._replaced = vars(module).get(_NAME), self._find_replaced(module)
            self.put()

    def _find_replaced(self, module: nn.Module) -> dict[str, Any]:
        table = vars(module)
        return {key: table[key] for key in self._entries() if key in table}

    def _leave(self, module: nn.Module) -> dict[str, Any]:
        """Take the entries away; gives those that were still there."""
        table = vars(module)
        found = {key: entry for key, entry in self._entries().items() if table.get(key) == entry}
        beneath = self._beneath()
        for key in found:
            if key in beneath:
                table[key] = beneath[key]
            else:
                del table[key]
        return found

    def _beneath(self) -> dict[str, Any]:
        """What was in the module before, without entries of ours that were removed in the meantime."""
        lower = self._replaced.get(_NAME)
        return lower._beneath() if isinstance(lower, InstanceForward) and lower.is_removed else self._replaced  # noqa: SLF001

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            message = (
                f"the module of this forward ('{self.name}', a region of recollect.apply) has been freed. "
                "Keep the module alive, and call it instead of its forward"
            )
            raise RuntimeError(message)
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What it stands for: the class's ``forward``, or what stood in the instance before."""
        if self._covered is not None:
            return self._covered
        module = self._owner()
        kind = type(module)
        if not self._is_static and type(forward := kind.forward) is FunctionType:  # the usual case, at every call
            return MethodType(forward, module)
        own: Callable[..., Any] = forward_of(kind).__get__(module, kind)
        return own

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON:
            return getattr(self.__wrapped__, name)
        raise AttributeError(name)

    # Copies and pickles: made as if nothing was there, then, of a deep copy, the same is put there.
    def _copy_module(self, memo: dict[int, Any]) -> Any:
        module = self._owner()
        entries = self._leave(module)
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            vars(module).update(entries)
        if _NAME in entries:
            self._for_copy(copied).put()
        return copied

    def _reduce_module(self, protocol: Any) -> Any:
        module = self._owner()
        entries = self._leave(module)
        try:
            # Whoever else stands here answers in turn.
            reduced: Any = getattr(module, "__reduce_ex__")(protocol)  # noqa: B009
            if isinstance(reduced, tuple) and len(reduced) > _STATE and reduced[_STATE] is vars(module):
                reduced = (*reduced[:_STATE], dict(vars(module)), *reduced[_STATE + 1 :])
        finally:
            vars(module).update(entries)
        return reduced


def entries_of(module: nn.Module) -> Iterator[InstanceForward]:
    """Those that a module's calls go through and that are in force, outermost first."""
    found = vars(module).get(_NAME)
    for _ in range(_DEEPEST):
        if found is None:
            return
        if isinstance(found, InstanceForward) and not found.is_removed:
            yield found
        found = getattr(found, "__wrapped__", None)
