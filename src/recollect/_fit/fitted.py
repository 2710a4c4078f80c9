"""The handle of a model that was made to fit: prints, runs forward and backward as they were fitted, removes."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from recollect._apply.model import Applied
from recollect._core.levers import MICRO_BATCHES
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._fit.batches import read_batch
from recollect._fit.micro_batches import split_batch


class Fitted:
    """A model that was made to fit; made by `recollect.fit`. Prints what was predicted beside what was measured.

    Attributes:
        plan: what it runs under, with the measured figures in its forecast.
        tries: how many plans were run until one was within the budget.
        profile: of the plain step, that the plan was made of.
    """

    def __init__(self, applied: Applied, plan: Plan, tries: int, profile: Profile, steps: Steps | None) -> None:
        self._applied, self._steps = applied, steps
        self.plan, self.tries, self.profile = plan, tries, profile

    @property
    def is_removed(self) -> bool:
        """Whether it was undone."""
        return self._applied.is_removed

    def forward_backward(self, batch: Any) -> Tensor:
        """Run forward and backward with a batch as `fit` was given one; gradients are added to those that there are.

        If the plan has the lever ``"micro_batches"``, the batch runs in its parts. Optimizers are yours to step.

        Returns:
            The loss, without a graph.

        Raises:
            ValueError: `fit` was given `step`, which is yours to run; it was removed; or the batch cannot be cut.

        >>> import torch, recollect
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> fitted = recollect.fit(model, (x, y), loss=torch.nn.functional.mse_loss, budget="min")
        >>> fitted.forward_backward((x, y)).requires_grad, model[0].weight.grad.shape
        (False, torch.Size([64, 4]))
        """
        if self._steps is None:
            message = "recollect.fit was given step=, which runs forward and backward: call that"
            raise ValueError(message)
        if self.is_removed:
            message = "this fit was removed: forward_backward would run the plain step. Call recollect.fit again"
            raise ValueError(message)
        return self._steps.run(batch)

    def remove(self) -> None:
        """Take everything away: the model is as it was."""
        self._applied.remove()

    def __enter__(self) -> Self:
        """Nothing; leaving the block removes what was applied."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        """The plan as a table."""
        again = f" at try {self.tries}" if self.tries > 1 else ""
        text = f"recollect.fit{again}{' (removed)' if self.is_removed else ''}: {self.plan}"
        if any(lever.name == MICRO_BATCHES for lever in self.plan.levers):
            text += "\nrun forward and backward with fitted.forward_backward(batch), which cuts the batch"
        return text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


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
