"""What stands in a module's ``forward`` and sends what each call saves for backward elsewhere, or keeps it here."""

from __future__ import annotations

from typing import Any, Self

from torch import nn
from torch.compiler import is_dynamo_compiling

from recollect._apply.instance_forward import InstanceForward, entries_of
from recollect._core.decisions import Decision
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.functorch import transforms_active
from recollect._offload.offload import Offload, Passing, Staying
from recollect._policy.base import as_policy

offload_all = as_policy(Decision.OFFLOAD)
"""What a graph is told of the values of an offloaded module."""


class SentForward(InstanceForward):
    """Calls a module's own ``forward`` while an offload is in force; several modules share one, and so one timetable.

    Inside an offloaded module, one that is to be saved has such an entry too: with `Staying`; and beside it, with
    `Passing`, one at whose end memory is let go.
    """

    def __init__(self, module: nn.Module, name: str, away: Offload | Staying) -> None:
        super().__init__(module, name)
        self.away = away

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name, self.away)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        return self._call_in_graph(args, kwargs) if is_dynamo_compiling() else self._call(args, kwargs)

    def _call_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What Dynamo traces: a part of the graph whose values the partitioner is told to offload."""
        from recollect._apply.in_graph import call_in_graph

        own = self._own_in_graph(self._module())
        if self.is_removed or isinstance(self.away, Staying):
            return own(*args, **kwargs)
        return call_in_graph(self, own, offload_all, args, kwargs)

    @untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self.__wrapped__
        if self.is_removed or transforms_active():  # torch.func has no saved-tensor hooks
            return own(*args, **kwargs)
        with self.away:
            return own(*args, **kwargs)

    def __repr__(self) -> str:
        how = "watched" if isinstance(self.away, Passing) else "kept" if isinstance(self.away, Staying) else "offloaded"
        return f"<forward of '{self.name}', {how} by recollect>"


def sent_forward_of(module: nn.Module) -> SentForward | None:
    """The entry that sends a module's values away, or keeps them from it, if one is in force."""
    entries = (entry for entry in entries_of(module) if isinstance(entry, SentForward))
    return next((entry for entry in entries if not isinstance(entry.away, Passing)), None)
