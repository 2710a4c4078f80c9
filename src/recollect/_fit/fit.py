"""Fit: profile a step, plan it for a budget, apply the plan, run it, compare, correct; all else as found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recollect._apply.model import Applied, apply
from recollect._core.errors import BudgetError
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._fit.batches import read_batch, read_step
from recollect._fit.loaders import find_largest
from recollect._fit.plan import plan as make_plan
from recollect._fit.run import Runner

_log = logging.getLogger("recollect")

_MOST_TRIES = 4
_EXTRA = 0.002  # of the budget, beside what was measured too much
_UNKNOWN = 0.05  # of the budget: how much to save where memory ran out and nobody knows by how much


class Fitted:
    """A model that was made to fit; made by `recollect.fit`. Prints what was predicted beside what was measured.

    Attributes:
        plan: what it runs under, with the measured figures in its forecast.
        tries: how many plans were run until one was within the budget.
        profile: of the plain step, that the plan was made of.
    """

    def __init__(self, applied: Applied, plan: Plan, tries: int, profile: Profile) -> None:
        self._applied = applied
        self.plan, self.tries, self.profile = plan, tries, profile

    @property
    def is_removed(self) -> bool:
        """Whether it was undone."""
        return self._applied.is_removed

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
        return f"recollect.fit{again}{' (removed)' if self.is_removed else ''}: {self.plan}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    step: Callable[..., Any] | None = None,
    tiers: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Fitted:
    """Make a model's training step stay within a budget of memory: profile, plan, apply, run, compare, correct.

    A step that does not fit as it is, is profiled on fake tensors. Under the plan it is run and measured; where it
    takes more than the budget, a tighter plan is made. Parameters, buffers, gradients, optimizers and random generators
    are afterwards as they were, also if it fails.

    Args:
        model: any module; its modules become regions in place.
        batch: what a step is called with, as large as it gets: a tensor, a tuple of arguments, a dict of keywords,
            whatever the model's forward takes as one argument, or a DataLoader, of whose first 64 batches the largest
            is taken. Tensors on the CPU are sent to where the model is.
        budget: as of `recollect.plan`.
        loss: makes the loss of the model's output; one of two arguments is also given the targets, which the model then
            does not get: the last part of a tuple, ``labels``, ``targets`` or the like of a dict. By default the output
            is the loss, holds it as ``loss``, or is summed to one; a LightningModule has its ``training_step`` called.
        optimizer: an instance, whose state and step are counted, or a class.
        step: a function that runs a step with the model, called with the batch or its parts, in place of `loss`. If it
            returns a loss and has not run backward, that is run.
        tiers: as of `recollect.plan`.
        progress: called now and then with a number of things done and of things to do, or None.

    Returns:
        A handle that prints what was predicted and measured; its `remove` restores the model.

    Raises:
        BudgetError: no plan fits, or none that was run did.
        ValueError: an argument has a value it cannot have.

    >>> import torch, recollect
    >>> from torch.nn import GELU, Linear, Sequential
    >>> model = Sequential(*(Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(4)))
    >>> fitted = recollect.fit(model, torch.randn(512, 64), budget="3.5MiB")
    >>> fitted.plan.forecast.measured_peak_bytes <= 3.5 * 2**20
    True
    >>> model(torch.randn(512, 64)).sum().backward()
    >>> fitted.remove()
    """
    if not isinstance(model, nn.Module):
        message = f"recollect.fit expects a torch.nn.Module first, not {type(model).__name__}"
        raise TypeError(message)
    if step is not None and loss is not None:
        message = "recollect.fit: step= runs the whole step, its loss included; give one of step= and loss="
        raise ValueError(message)
    if isinstance(batch, DataLoader):
        batch = find_largest(batch)
    call = read_batch(batch, loss, model) if step is None else read_step(batch, step)
    run = Runner(model, call, optimizer, progress)
    seen = run.profile_plainly()
    wanted: int | str = budget
    plan = make_plan(seen, budget=wanted, tiers=tiers, progress=progress)
    assert plan.forecast is not None
    limit = plan.forecast.budget_bytes
    for tries in range(1, _MOST_TRIES + 1):
        applied = apply(model, plan)
        try:
            measured, seconds = run.measure()
        except BaseException:
            applied.remove()
            raise
        if limit is None or (measured is not None and measured <= limit):
            done = _write_measured(plan, measured, seconds, budget, limit)
            fitted = Fitted(applied, done, tries, seen)
            _log.info("%s", fitted)
            return fitted
        applied.remove()
        over = int(limit * _UNKNOWN) if measured is None else max(measured - plan.peak_bytes, measured - limit)
        wanted = (limit if isinstance(wanted, str) else wanted) - over - int(limit * _EXTRA)
        _log.info("recollect.fit: measured %s of %s, planning for %s", measured, limit, wanted)
        plan = _plan_tighter(seen, wanted, limit, measured, tiers)
    message = (
        f"no plan that was run stayed within {format_bytes(limit or 0)}: the last one of {_MOST_TRIES} took "
        f"{'more than the device has' if measured is None else format_bytes(measured)}.\n"
        "Raise the budget, or shrink the batch"
    )
    raise BudgetError(message, measured or plan.peak_bytes)


def _plan_tighter(seen: Profile, wanted: int, limit: int, measured: int | None, tiers: str | None) -> Plan:
    try:
        return make_plan(seen, budget=max(wanted, 1), tiers=tiers)
    except BudgetError as error:
        took = "memory ran out" if measured is None else f"the step took {format_bytes(measured)}"
        message = (
            f"no plan fits {format_bytes(limit)}: {took} under the plan for it, and a tighter one is not possible.\n"
        )
        raise BudgetError(message + str(error), error.smallest_bytes) from None


def _write_measured(
    plan: Plan, measured: int | None, seconds: float | None, budget: int | str, limit: int | None
) -> Plan:
    assert plan.forecast is not None
    text = plan.forecast.budget if limit is None else budget if isinstance(budget, str) else format_bytes(limit)
    forecast = replace(
        plan.forecast, measured_peak_bytes=measured, measured_step_s=seconds, budget=str(text), budget_bytes=limit
    )
    return replace(plan, forecast=forecast)
