"""What stands in a module's ``forward`` and makes each call of it a region.

It is an entry in the instance's dictionary, where torch finds it before the class's own ``forward``. So the region lies
within all hooks of the module, whoever registered them and when: those of FSDP gather and cast before it begins, users'
hooks fire once, and torch.compile traces it as it traces any ``forward``. Class, names and state_dict do not show it.
See docs/design/models.md.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

from torch import nn

from recollect._apply.options import Choices

_NAME = "forward"


class StandIn:
    """Calls a module's own ``forward`` as a region; holds the module weakly, so that no cycle arises.

    A deep copy of the module carries a stand-in of its own. A pickled module is the plain one: its file needs nothing
    of this library. A stand-in that someone has covered by a ``forward`` of theirs cannot be taken away; removed, it
    passes calls on as they are.
    """

    __slots__ = ("__weakref__", "_covered", "_module", "choices", "is_removed", "name")

    def __init__(self, module: nn.Module, name: str, choices: Choices, covered: Callable[..., Any] | None) -> None:
        self._module = ref(module)
        self._covered = covered
        self.name, self.choices = name, choices
        self.is_removed = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What it stands for: the class's ``forward``, or what stood in the instance before."""
        if self._covered is not None:
            return self._covered
        module = self._module()
        assert module is not None, "a module outlives its own attributes"
        own: Callable[..., Any] = MethodType(type(module).forward, module)
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        own = self.__wrapped__
        if self.is_removed:
            return own(*args, **kwargs)
        return self.choices.region(self.name, own).call(args, kwargs)

    def __repr__(self) -> str:
        return f"<forward of '{self.name}' as a region of recollect>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module()))
        covered = copy.deepcopy(self._covered, memo)
        if copied is None or self.is_removed:  # a copy of the stand-in alone is the plain forward
            return self.__wrapped__ if covered is None else covered
        return StandIn(copied, self.name, self.choices, covered)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._covered is not None:
            return functools.partial, (self._covered,)
        return getattr, (self._module(), _NAME)


def put(module: nn.Module, name: str, choices: Choices) -> StandIn:
    """Make each call of a module a region."""
    stand_in = StandIn(module, name, choices, vars(module).get(_NAME))
    vars(module)[_NAME] = stand_in
    return stand_in


def take_away(module: nn.Module, stand_in: StandIn) -> None:
    """Undo `put`; once is enough."""
    if stand_in.is_removed:
        return
    stand_in.is_removed = True
    table = vars(module)
    if table.get(_NAME) is stand_in:
        if stand_in._covered is None:  # noqa: SLF001
            del table[_NAME]
        else:
            table[_NAME] = stand_in._covered  # noqa: SLF001


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


_DEEPEST = 16  # forwards over forwards
