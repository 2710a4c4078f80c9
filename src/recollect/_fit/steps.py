"""Runs forward and backward of a model for the user, a batch in one or in several parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recollect._fit.batches import read_batch
from recollect._fit.micro_batches import split_batch


class Steps:
    """Runs forward and backward of a model.

    Args:
        model: the model.
        loss: as of `fit`.
        parts: how many micro-batches a batch is cut into.
        weight: what the loss of each is multiplied with.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor] | None, *, parts: int = 1, weight: float = 1.0
    ) -> None:
        self._model, self._loss, self.parts, self._weight = model, loss, parts, weight

    def run(self, batch: Any) -> Tensor:
        """Run a batch, in parts; gives its loss."""
        total: Tensor | None = None
        with torch.enable_grad():
            for part in split_batch(batch, self.parts):
                loss = self.run_part(part)
                total = loss if total is None else total + loss
        assert total is not None
        return total

    def run_part(self, part: Any) -> Tensor:
        """Run one part of a batch."""
        loss = read_batch(part, self._loss, self._model).lose()
        loss = loss if self._weight == 1 else loss * self._weight
        loss.backward()
        return loss.detach()
