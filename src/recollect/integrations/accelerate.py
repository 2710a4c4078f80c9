"""Accelerate: regions as one of its hooks. Tested with accelerate 1.15.

Calling `recollect.apply` before or after ``accelerator.prepare`` does the same. Use the hook if your code keeps all
changes to a model in hooks. If an FSDP plugin has ``activation_checkpointing=True``, `recollect.compat.install` runs it
on this engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from torch import nn

from recollect._apply.handle import Applied
from recollect._apply.model import Rules, apply, check_request
from recollect._core.spelling import options_of, refuse_unknown
from recollect._policy.base import PolicyLike
from recollect.integrations.extras import require

__all__ = ["RecollectHook"]

if TYPE_CHECKING:
    ModelHook = object
else:
    ModelHook = require("accelerate.hooks", extra="accelerate").ModelHook


class RecollectHook(ModelHook):
    """An Accelerate hook that turns modules into regions while it is on a model.

    Add it by ``accelerate.hooks.add_hook_to_module(model, RecollectHook(...), append=True)``;
    ``remove_hook_from_module`` undoes it.

    Args:
        rules: as for `recollect.apply`; by default the repeated blocks are recomputed.
        policy: as for `recollect.apply`.
        every: as for `recollect.apply`.
        first: as for `recollect.apply`.
        unknown: there are no other options.

    Raises:
        ValueError: an option has an invalid value.
        TypeError: an option is unknown, or has the wrong type.

    Attributes:
        handle: the handle from `recollect.apply`, while the hook is on a model.

    >>> import torch
    >>> from accelerate.hooks import add_hook_to_module, remove_hook_from_module
    >>> from recollect.integrations.accelerate import RecollectHook
    >>> layer = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> model, hook = torch.nn.Sequential(layer(), layer()), RecollectHook()
    >>> model = add_hook_to_module(model, hook)
    >>> hook.handle
    recollect.apply: 2 regions in Sequential
    module  class       what       rule
    0-1     Sequential  recompute  repeated blocks
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model = remove_hook_from_module(model)
    """

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        policy: PolicyLike | str | None = None,
        every: int | None = None,
        first: int | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(
                "RecollectHook", unknown, options_of(RecollectHook), "it takes the arguments of recollect.apply"
            )
        check_request(rules, policy=policy, every=every, first=first)
        self._options: dict[str, Any] = {"rules": rules, "policy": policy, "every": every, "first": first}
        self.handle: Applied | None = None

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added to a model."""
        self.handle = apply(module, **self._options)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed from the model."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        return module
