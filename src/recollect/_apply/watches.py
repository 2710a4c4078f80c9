"""Hooks that look at every call of a model and may put regions into it: found in the model, and ended there."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class ForwardWatch(ABC):
    """A forward pre-hook of a model that puts regions in force, even if none are now."""

    @abstractmethod
    def remove(self) -> None:
        """Take the regions away, and look no more."""


def end_watches(model: nn.Module) -> None:
    """End what watches a model or its parts. Regions alone do not show that something does: a plan may have none."""
    for module in model.modules():
        for hook in list(vars(module).get("_forward_pre_hooks", {}).values()):
            if isinstance(hook, ForwardWatch):
                hook.remove()
