"""The handle of a model that was made to fit: prints, runs forward and backward as they were fitted, removes."""

from __future__ import annotations

import logging
from traceback import clear_frames
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from recollect._core.errors import BudgetError
from recollect._core.levers import MICRO_BATCHES
from recollect._core.plans import Plan
from recollect._core.units import format_bytes
from recollect._fit.attempts import Attempt
from recollect._fit.recovery import Recovery
from recollect._fit.shapes import PlanSwitch
from recollect._inspect.oom.error import read_shortage

_log = logging.getLogger("recollect")

_TIGHTER = 0.9
"""How much of the predicted peak a plan may take after one under which memory ran out."""


class Fitted:
    """A fitted model, made by `recollect.fit`. Prints predicted next to measured figures.

    Attributes:
        plans: one for each batch that it was fitted with, the largest last, with the measured figures in their
            forecasts.
        tries: how many plans ran until one stayed within the budget.
        profile: the profile of the plain step that the plan was made from.
    """

    def __init__(
        self,
        attempt: Attempt,
        switch: PlanSwitch,
        *,
        plans: tuple[Plan, ...],
        tries: int,
        recovers: bool = False,
    ) -> None:
        self._attempt, self._switch, self._recovers = attempt, switch, recovers
        self._steps = attempt.make_steps()
        self.plans, self.tries, self.profile = plans, tries, attempt.plain

    @property
    def plan(self) -> Plan:
        """The plan for the largest batch."""
        return self.plans[-1]

    @property
    def model(self) -> nn.Module:
        """The model, as it was given to `fit`."""
        return self._attempt.subject.model

    @property
    def is_removed(self) -> bool:
        """Whether it has been undone, by its own ``remove`` or by `recollect.remove`."""
        return self._switch.finds_it_removed()

    def forward_backward(self, batch: Any) -> Tensor:
        """Run forward and backward on a batch like the one that `fit` was given. Gradients accumulate.

        If the plan has the lever ``"micro_batches"``, the batch runs in parts. You call the optimizer yourself.

        If you called `fit` with ``recover=True`` and memory runs out, this restores gradients, buffers, random
        generators and what modules count in attributes, switches to a tighter plan, and runs the batch once more. The
        log says so.

        Returns:
            The loss, without a graph.

        Raises:
            ValueError: you called `fit` with a `step`, which you run yourself; the plan was removed; or the batch
                cannot be split.
            torch.OutOfMemoryError: memory ran out and recovery is impossible: it ran out twice, no plan is tighter, or
                an optimizer has already stepped in backward.

        >>> import torch, recollect
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        >>> x, y = torch.randn(32, 4), torch.randn(32, 1)
        >>> fitted = recollect.fit(model, (x, y), loss=torch.nn.functional.mse_loss, budget="min")
        >>> fitted.forward_backward((x, y)).requires_grad, model[0].weight.grad.shape
        (False, torch.Size([64, 4]))
        """
        if self._steps is None:
            message = "recollect.fit was given step=, which runs forward and backward: call that function instead"
            raise ValueError(message)
        if self.is_removed:
            message = "this fit was removed: forward_backward would run the plain step. Call recollect.fit again"
            raise ValueError(message)
        if not self._recovers:
            return self._steps.run(batch)
        recovery = Recovery(self._attempt.subject.model)
        try:
            return self._steps.run(batch)
        except RuntimeError as error:
            if read_shortage(error) is None:
                raise
            tighter = self._find_tighter(error, recovery)
            clear_frames(error.__traceback__)  # they hold tensors
        recovery.restore()
        self._tighten(tighter)
        try:
            return self._steps.run(batch)
        except RuntimeError as error:
            if read_shortage(error) is None:
                raise
            clear_frames(error.__traceback__)
            recovery.restore()
            error.add_note(
                "recollect.fit: memory ran out again under a tighter plan. Gradients are as they were before the step"
            )
            raise

    def _find_tighter(self, error: RuntimeError, recovery: Recovery) -> Plan:
        """A plan for less than what is in force takes.

        Raises:
            RuntimeError: the given one, where nothing can be run again.
        """
        now = self._switch.current or self.plan
        if recovery.has_stepped:
            error.add_note("recollect.fit: the step is not repeated: parameters were changed before memory ran out")
            raise error
        try:
            return self._attempt.plan(int(now.peak_bytes * _TIGHTER))
        except BudgetError as refusal:
            clear_frames(error.__traceback__)
            recovery.restore()
            error.add_note(f"recollect.fit: the step is not repeated: {refusal}")
            raise error from None

    def _tighten(self, tighter: Plan) -> None:
        model, now = self._attempt.subject.model, self._switch.current or self.plan
        _log.warning(
            "recollect.fit: memory ran out under a plan for %s. Gradients, buffers and random generators are "
            "restored, and the step runs again under a plan for %s",
            format_bytes(now.peak_bytes),
            format_bytes(tighter.peak_bytes),
        )
        self._switch.replace(model, now, tighter)
        self.plans = tuple(tighter if plan is now else plan for plan in self.plans)

    def remove(self) -> None:
        """Restore the model."""
        self._switch.remove()

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
