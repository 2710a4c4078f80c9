"""Whether a step clears gradients before its forward, or has those of the step before in memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Clearing:
    """Looks on while a step runs for the first time, when parameters have no gradients yet.

    Args:
        model: whose gradients count.

    Attributes:
        finds_gradients: whether later steps have gradients in their forward: they are cleared only after it, as in
            ``loss = model(x); optimizer.zero_grad(); loss.backward()``, or are never freed, but set to zero; None if
            nobody cleared them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_run = False
        self.finds_gradients: bool | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note it meanwhile. ``zero_grad`` of every optimizer and module is seen, not what is set to None by hand."""
        handle = self._model.register_forward_pre_hook(self._note_forward)
        kinds: list[Any] = [torch.optim.Optimizer, nn.Module]
        originals = [kind.zero_grad for kind in kinds]
        for kind, original in zip(kinds, originals, strict=True):
            kind.zero_grad = self._telling(original)
        try:
            yield
        finally:
            for kind, original in zip(kinds, originals, strict=True):
                kind.zero_grad = original
            handle.remove()

    def _note_forward(self, _: nn.Module, __: Any) -> None:
        self._has_run = True

    def _telling(self, original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            if self.finds_gradients is None and self._concerns(owner):
                has_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
                frees = args[0] if args else kwargs.get("set_to_none", True)
                self.finds_gradients = not frees or (self._has_run and not has_gradients)
            original(owner, *args, **kwargs)

        return zero_grad

    def _concerns(self, owner: Any) -> bool:
        if isinstance(owner, nn.Module):
            cleared = set(owner.parameters())
        else:
            cleared = {parameter for group in owner.param_groups for parameter in group["params"]}
        return any(parameter in cleared for parameter in self._model.parameters())
