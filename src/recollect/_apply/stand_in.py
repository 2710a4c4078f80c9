"""What stands in a module's ``forward`` and makes each call of it a region.

So the region lies within all hooks of the module: those of FSDP gather and cast before it begins, users' hooks fire
once, and torch.compile traces it as it traces any ``forward``. See docs/design/models.md.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from recollect._apply.caches import cache_classes, without_cache
from recollect._apply.instance_forward import InstanceForward, entries_of
from recollect._apply.options import Choices, warn_if_nothing_kept
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.torchscript import is_tracing
from recollect._policy.presets import Tally
from recollect._recompute.memory import Memory


class StandIn(InstanceForward):
    """Calls a module's own ``forward`` as a region."""

    def __init__(self, module: nn.Module, name: str, choices: Choices) -> None:
        super().__init__(module, name)
        self.choices = choices
        self.sends = choices.sends  # read by Dynamo, which would trace a property
        self.contexts: Any = None  # what a region in a graph takes its policy from, in torch's way
        self._caches = cache_classes()
        self._memory = Memory()
        self.reports: tuple[Tally, str] | None = None  # a tally to look at after each call, and of what it is

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name, self.choices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        return self._call_in_graph(args, kwargs) if is_dynamo_compiling() else self._call(args, kwargs)

    def _call_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What Dynamo traces."""
        from recollect._apply.in_graph import call_in_graph

        own = self._own_in_graph(self._module())
        if self.is_removed:
            return own(*args, **kwargs)
        if self._caches:
            module: Any = self._module()
            args, kwargs = without_cache(module, self._caches, args, kwargs)
        choices = self.choices
        return call_in_graph(self, own, choices.policy, args, kwargs, self.contexts, choices.elsewhere, self.sends)

    @untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self.__wrapped__
        if self.is_removed:
            return own(*args, **kwargs)
        if self._caches:
            args, kwargs = without_cache(self._owner(), self._caches, args, kwargs)
        if is_tracing():  # torch.jit.trace, which TensorBoard's add_graph calls, takes down what runs: that is plain
            return own(*args, **kwargs)
        if is_exporting():
            from recollect._apply.in_graph import call_in_graph

            choices = self.choices
            return call_in_graph(self, own, choices.policy, args, kwargs, self.contexts, choices.elsewhere, self.sends)
        region = self.choices.region(self.name, own)  # not held: it holds the module
        region.memory = self._memory
        result = region.call(args, kwargs)
        if self.reports is not None:
            warn_if_nothing_kept(*self.reports)
        return result

    def __repr__(self) -> str:
        return f"<forward of '{self.name}' as a region of recollect>"


def stand_in_of(module: nn.Module) -> StandIn | None:
    """The stand-in that makes a module's calls regions, if one is in force."""
    return next((entry for entry in entries_of(module) if isinstance(entry, StandIn)), None)
