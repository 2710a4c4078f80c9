"""Forward hooks of the modules of a region, and those on all modules: recomputation runs those that forward ran.

Hooks may come and go between forward and backward: context managers put them there that steer or patch a model, and
adapters for the time of one call. What counts is what is there at exit, so that a hook that forward itself has set up
stays, and one that has taken itself away does not come back. Torch's own hooks are its business: they shard, gather and
track, and know what is a recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from types import FunctionType
from typing import Any
from weakref import ref

from recollect._core.reachable import is_of_library
from recollect._core.reads import only_collects
from recollect._core.torch_private.modules import global_hook_tables

Table = dict[str, Any]
HookTable = dict[int, Any]
Group = tuple[HookTable, ...]
"""A table of hooks, by their numbers, and the tables that say of some how they are called."""

_GROUPS = (
    itemgetter("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    itemgetter("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

Noted = dict[int, Group]
"""By the number of its group: copies of the tables that hold any hook."""


class ModuleHooks:
    """Where the hooks of some modules stand: found once. Holds tables of hooks, not the modules."""

    __slots__ = ("_groups", "_tables")

    def __init__(self, tables: list[Table]) -> None:
        hooks, pre_hooks = _GROUPS
        self._groups: list[Group] = [*map(hooks, tables), *map(pre_hooks, tables), *global_hook_tables()]
        self._tables = [group[0] for group in self._groups]

    def note(self) -> Noted | None:
        """The hooks that there are now; None if there are none."""
        if not any(self._tables):
            return None
        return {
            number: ({key: _Loose.of(hook) for key, hook in group[0].items()}, *map(dict, group[1:]))
            for number, group in enumerate(self._groups)
            if group[0]
        }

    def are(self, noted: Noted | None) -> bool:
        """Whether those that there are now are the noted ones."""
        if noted is None:
            return not any(self._tables)
        now = [(number, table) for number, table in enumerate(self._tables) if table]
        return len(now) == len(noted) and all(number in noted and noted[number][0] == table for number, table in now)

    def put(self, noted: Noted | None, stack: ExitStack) -> None:
        """Put the noted hooks in the place of those that there are now; the stack puts these back."""
        for number, group in enumerate(self._groups):
            then = (noted or {}).get(number, ({},) * len(group))
            then = (_Loose.resolve(then[0]), *then[1:])
            if not group[0] and not then[0]:
                continue
            wanted = _merge(then[0], group[0])
            if list(wanted.items()) != list(group[0].items()):
                ways = [{key: True for key in wanted if key in a or key in b} for a, b in zip(then, group, strict=True)]
                stack.callback(_set, group, tuple(map(dict, group)))
                _set(group, (wanted, *ways[1:]))

    def find(self, noted: Noted | None) -> list[Callable[..., Any]]:
        """The noted ones, which may have gone since, and all that there are now, but for torch's."""
        tables = [_Loose.resolve(group[0]) for group in noted.values()] if noted else []
        if not tables and not any(self._tables):
            return []
        tables += self._tables
        return [hook for table in tables for hook in table.values() if not is_of_library(hook)]


class _Loose:
    """A hook that only collects, and is not held: what it collects leads to the graph, and so to who holds this.

    Attributes:
        hook: gives it, or None if it is gone.
    """

    __slots__ = ("hook",)

    def __init__(self, hook: FunctionType) -> None:
        self.hook = ref(hook)

    @classmethod
    def of(cls, hook: Any) -> Any:
        """This, or the hook itself."""
        return cls(hook) if type(hook) is FunctionType and only_collects(hook) else hook

    @staticmethod
    def resolve(table: HookTable) -> HookTable:
        """The hooks, but for those that are gone."""
        found = {key: hook.hook() if type(hook) is _Loose else hook for key, hook in table.items()}
        return {key: hook for key, hook in found.items() if hook is not None}

    def __eq__(self, other: object) -> bool:
        """Tables are compared in C, and ask this."""
        return self.hook() is other

    __hash__ = None  # type: ignore[assignment]


def _merge(then: HookTable, now: HookTable) -> HookTable:
    """The hooks of then, but torch's as they are now."""
    merged = {key: hook for key, hook in then.items() if key in now or not is_of_library(hook)}
    return merged | {key: hook for key, hook in now.items() if key not in then and is_of_library(hook)}


def _set(group: Group, others: Group) -> None:
    for table, other in zip(group, others, strict=True):
        if table != other or list(table) != list(other):
            table.clear()
            table.update(other)
