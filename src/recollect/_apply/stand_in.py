"""What stands in a module's ``forward`` and makes each call of it a region.

It is an entry in the instance's dictionary, where torch finds it before the class's own ``forward``. So the region lies
within all hooks of the module, whoever registered them and when: those of FSDP gather and cast before it begins, users'
hooks fire once, and torch.compile traces it as it traces any ``forward``. Class, names and state_dict do not show it.
Two more entries answer those who copy or pickle the module. See docs/design/models.md.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn
from torch.compiler import is_dynamo_compiling

from recollect._apply.forwards import forward_of
from recollect._apply.options import Choices
from recollect._core.torch_private.compiler import untraced

_NAME = "forward"
_DEEPEST = 16  # forwards over forwards
_STATE = 2  # its place in what `__reduce_ex__` gives
# What readers of a function ask it for. Not what it is bound to: who unbinds it would leave the region out.
_PASSED_ON = frozenset({"__name__", "__qualname__", "__annotations__", "__doc__", "__code__", "__globals__"})


class StandIn:
    """Calls a module's own ``forward`` as a region; holds the module weakly, so that no cycle arises.

    A deep copy of the module has a stand-in of its own; a shallow copy and a pickled module are plain. A stand-in that
    someone has covered by a ``forward`` of theirs cannot be taken away; removed, it passes calls on as they are.
    """

    def __init__(self, module: nn.Module, name: str, choices: Choices) -> None:
        table = vars(module)
        self._module = ref(module)
        self._covered: Callable[..., Any] | None = table.get(_NAME)
        self.name, self.choices = name, choices
        self.contexts: Any = None  # what a region in a graph takes its policy from, in torch's way
        self.is_removed = False
        self._is_static = isinstance(forward_of(type(module)), staticmethod)
        self._replaced = {key: table[key] for key in self._entries() if key in table}

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

    def _leave(self, module: nn.Module) -> dict[str, Any]:
        """Take the entries away; gives those that were still there."""
        table = vars(module)
        found = {key: entry for key, entry in self._entries().items() if table.get(key) == entry}
        for key in found:
            if key in self._replaced:
                table[key] = self._replaced[key]
            else:
                del table[key]
        return found

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            message = (
                f"the module of this forward ('{self.name}', a region of recollect.apply) is gone. Keep the module and "
                "call it, in place of its forward alone"
            )
            raise RuntimeError(message)
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What it stands for: the class's ``forward``, or what stood in the instance before."""
        if self._covered is not None:
            return self._covered
        module = self._owner()
        own: Callable[..., Any] = forward_of(type(module)).__get__(module, type(module))
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        return self._call_in_graph(args, kwargs) if is_dynamo_compiling() else self._call(args, kwargs)

    def _call_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What Dynamo traces: it binds no methods."""
        from recollect._apply.in_graph import call_in_graph

        own: Any = self._covered
        if own is None:
            module: Any = self._module()
            own = type(module).forward if self._is_static else functools.partial(type(module).forward, module)
        if self.is_removed:
            return own(*args, **kwargs)
        return call_in_graph(self, own, self.choices.policy, args, kwargs, self.contexts)

    @untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self.__wrapped__
        if self.is_removed:
            return own(*args, **kwargs)
        return self.choices.region(self.name, own).call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON:
            return getattr(self.__wrapped__, name)
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<forward of '{self.name}' as a region of recollect>"

    # Copies and pickles: made as if nothing was there, then, of a deep copy, the same is put there.
    def _copy_module(self, memo: dict[int, Any]) -> Any:
        module = self._owner()
        entries = self._leave(module)
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            vars(module).update(entries)
        if _NAME in entries:
            type(self)(copied, self.name, self.choices).put()
        return copied

    def _reduce_module(self, protocol: Any) -> Any:
        module = self._owner()
        entries = self._leave(module)
        try:
            reduced: Any = type(module).__reduce_ex__(module, protocol)
            if isinstance(reduced, tuple) and len(reduced) > _STATE and reduced[_STATE] is vars(module):
                reduced = (*reduced[:_STATE], dict(vars(module)), *reduced[_STATE + 1 :])
        finally:
            vars(module).update(entries)
        return reduced


def stand_in_of(module: nn.Module) -> StandIn | None:
    """The stand-in that a module's calls go through, if it is in force."""
    found = vars(module).get(_NAME)
    for _ in range(_DEEPEST):
        if isinstance(found, StandIn) and not found.is_removed:
            return found
        found = getattr(found, "__wrapped__", None)
        if found is None:
            return None
    return None
