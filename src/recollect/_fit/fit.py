"""Fit: profile a step, plan it for a budget, apply the plan, run it, compare, correct; all else as found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
from torch import Tensor, nn

from recollect._apply.handle import Applied
from recollect._apply.model import apply
from recollect._apply.watches import end_watches
from recollect._core.errors import BudgetError
from recollect._core.levers import MICRO_BATCHES
from recollect._core.plans import Plan
from recollect._core.spelling import options_of, refuse_unknown, spell_lever, spell_levers
from recollect._core.units import format_bytes
from recollect._fit.arguments import check_arguments, refuse_misplaced
from recollect._fit.attempts import Attempt, Subject, choose_attempt
from recollect._fit.batches import read_batch, read_step
from recollect._fit.compiled import as_written
from recollect._fit.fitted import Fitted
from recollect._fit.levers import read_levers
from recollect._fit.loaders import list_batches
from recollect._fit.ranks import Ranks
from recollect._fit.shapes import Bucket, PlanSwitch, SeenShapes
from recollect._fit.verify import compare_gradients
from recollect._plan.budget import FASTEST, SMALLEST
from recollect._plan.solvers.highs import import_scipy
from recollect._plan.tiers import read_tiers
from recollect._selective.knowledge import Learned

_log = logging.getLogger("recollect")

_MOST_TRIES = 4
_EXTRA = 0.002  # of the budget, beside what was measured too much
_MISSED = 0.01  # of a predicted peak: what is further above it was predicted wrongly
_UNKNOWN = 0.05  # of the budget: how much to save where memory ran out and nobody knows by how much


def fit(  # noqa: PLR0913 (all but the first two are for some)
    model: nn.Module,
    batch: Any = None,
    *misplaced: Never,
    budget: int | str,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    step: Callable[..., Any] | None = None,
    tiers: str | Sequence[str] | None = None,
    levers: Iterable[str] | Mapping[str, Any] = (),
    recover: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
    **unknown: Never,
) -> Fitted:
    """Make a training step stay within a memory budget: profile, plan, apply, run, compare, correct.

    Call it once, before the training loop. A step that does not fit is profiled on fake tensors. `fit` then runs it
    under the plan and measures it; if it uses more than the budget, `fit` tries a tighter plan. Parameters, buffers,
    gradients, optimizers and random generators are restored afterwards, even if it fails.

    Args:
        model: any module; its modules become regions in place. If it is compiled, or has compiled parts, `fit` plans
            from a step that runs uncompiled. The figures are those of the compiled step; on the CPU, where the memory
            of compiled code cannot be seen, those of the uncompiled one.
        batch: the largest batch: a tensor, a tuple of arguments, a dict of keyword arguments, anything that the model's
            forward takes as its only argument, or a DataLoader, whose first 64 batches are searched for the largest.
            Tensors on the CPU are moved to the model's device. A list of tuples or dicts means several batches of
            different shapes, each with its own plan; larger calls run under the plan with the smallest peak, and the
            log says so once.
        misplaced: must be empty; a batch of several parts is one tuple, and options are passed by name.
        budget: the most device memory that the whole step may use: bytes, text like ``"40GiB"``, a share of the device
            like ``"90%"``, ``"min"`` for the smallest peak, ``"fastest"`` for the plain step.
        loss: computes the loss from the model's output. If it takes two arguments, it also gets the targets, and the
            model does not: the last part of a tuple; ``labels``, ``targets`` or similar in a dict. By default the
            output is the loss, holds it as ``loss``, or is summed; for a LightningModule, ``training_step`` is called.
        optimizer: an instance, whose state and step are counted, or a class.
        step: instead of `loss`, a function that runs a step with the model, called with the batch or its parts. If it
            returns a loss and has not run backward, `fit` runs backward.
        tiers: where values may wait: ``"host"`` memory, ``"disk"``, or ``("host", "disk")``. By default, nowhere.
        levers: what `fit` may do beyond keeping and recomputing values, by name. It uses only the levers that the
            budget needs, and the plan shows them. Results are then equal up to rounding. ``"chunked_loss"``: computes
            the last linear layer and its cross entropy a few rows at a time, without the full logits.
            ``"chunked_mlp"``: runs the parts of blocks that treat each token separately on a few tokens at a time.
            ``"micro_batches"``: if nothing else fits, runs the batch in equal parts, by `Fitted.forward_backward`. A
            mapping says more: ``{"chunked_loss": "lm_head", "chunked_mlp": "layers.*.mlp", "micro_batches": 4}``.
        recover: whether `Fitted.forward_backward` restores everything when memory runs out, switches to a tighter plan
            and runs the batch once more. It then copies buffers, and gradients if there are any, to the host at each
            call.
        progress: a function, called now and then with the number of things done and the number to do, or None.
        unknown: there are no other options; the error says which one is probably meant.

    Returns:
        A handle that prints predicted and measured figures; its ``remove`` restores the model.

    Raises:
        BudgetError: no plan fits, or none stayed within the budget when it ran.
        OffloadError: `tiers` names the disk, and it cannot be written.
        ImportError: scipy, whose HiGHS solver makes the plans, cannot be imported.
        ValueError: an argument has an invalid value.
        TypeError: an argument has the wrong type, or an option is unknown.

    >>> import torch, recollect
    >>> from torch.nn import GELU, Linear, Sequential
    >>> model = Sequential(*(Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(4)))
    >>> fitted = recollect.fit(model, torch.randn(512, 64), budget="3.5MiB")
    >>> fitted.plan.forecast.measured_peak_bytes <= 3.5 * 2**20
    True
    >>> model(torch.randn(512, 64)).sum().backward()
    >>> fitted.remove()
    """
    if unknown:
        name = next(iter(unknown))
        otherwise = f"pass the model's own arguments as its batch, as in batch={{{name!r}: ...}}"
        refuse_unknown("recollect.fit", unknown, options_of(fit), otherwise)
    refuse_misplaced(misplaced)
    check_arguments(
        model, batch, budget=budget, loss=loss, step=step, optimizer=optimizer, recover=recover, progress=progress
    )
    end_watches(model)  # of an earlier fit that has no region in force: this one takes its place
    if tiers is not None:
        read_tiers(tiers)
    import_scipy()  # before the step runs
    asked = read_levers(levers, owns_step=step is None)
    batches = list_batches(batch)
    if len(batches) > 1 and MICRO_BATCHES in asked:
        message = f"{spell_lever(MICRO_BATCHES)} works with one batch, but {len(batches)} were given: pass the largest"
        raise ValueError(message)
    ranks = Ranks(model)
    ranks.check_same("budget", str(budget))
    if recover and not ranks.are_alone:
        message = (
            "recover=True works in a single process only: if memory ran out in one of several, the others would "
            "wait for it"
        )
        raise ValueError(message)
    if asked and not ranks.are_alike:
        message = (
            f"{spell_levers(asked)}: levers need the same model in every process, but here they differ, as pipeline "
            "stages do: fit without levers"
        )
        raise ValueError(message)
    subjects = [
        Subject(
            model=model,
            batch=one,
            loss=loss,
            call=read_batch(one, loss, model) if step is None else read_step(one, step),
            owns_step=step is None,
            optimizer=optimizer,
            tiers=tiers,
            progress=progress,
            ranks=ranks,
        )
        for one in batches
    ]
    corrected: list[_Corrected] = []
    try:
        for subject in subjects:
            if corrected:
                corrected[-1].applied.pause()
            with as_written(model):
                chosen = choose_attempt(subject, asked, budget)
            corrected.append(_correct(*chosen, budget))
        fitted = _finish(model, corrected, budget, recovers=recover)
    except BaseException:
        for done in corrected:
            done.applied.remove()
        raise
    _log.info("%s", fitted)
    return fitted


def _finish(model: nn.Module, corrected: list[_Corrected], budget: int | str, *, recovers: bool) -> Fitted:
    """The handle of what was corrected, of which the last is in force."""
    last = corrected[-1]
    buckets = [Bucket(shapes=frozenset(done.seen.shapes), plan=done.plan) for done in corrected if done.seen.shapes]
    safe = None if budget == FASTEST or not buckets else last.attempt.plan(SMALLEST)
    ready = [(done.plan, done.applied) for done in corrected]
    switch = PlanSwitch(buckets, safe).start(model, last.plan, ready)
    plans = tuple(done.plan for done in corrected)
    for note in dict.fromkeys(one for done in corrected for one in done.plan.notes):
        if note not in last.attempt.profile.notes:
            _log.warning("recollect.fit: %s", note)
    return Fitted(last.attempt, switch, plans=plans, tries=max(done.tries for done in corrected), recovers=recovers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corrected:
    """A way to make a batch fit that was run, and stayed within the budget; its plan is in force."""

    attempt: Attempt
    plan: Plan
    tries: int
    applied: Applied
    seen: SeenShapes


def _correct(attempt: Attempt, plan: Plan, refusal: BudgetError | None, budget: int | str) -> _Corrected:
    """Run the step under its plan, and under tighter ones, until it stays within the budget.

    Args:
        attempt: how the step is run.
        plan: what to begin with.
        refusal: why no plan fits as predicted, if there is none: then this one is for the step to decide.
        budget: as the user gave it.

    Raises:
        BudgetError: it does not.
    """
    assert plan.forecast is not None
    limit, ranks = plan.forecast.budget_bytes, attempt.subject.ranks
    wanted: int | str = budget
    seen, tried, peaks = SeenShapes(), set[str](), list[int]()
    with as_written(attempt.subject.model):
        ranks.together(lambda: compare_gradients(attempt))
    for tries in range(1, _MOST_TRIES + 1):
        run = _run(attempt, plan, seen)
        fits = limit is None or (run.peak_bytes is not None and run.peak_bytes <= limit)
        if ranks.all(fits):
            if limit is None:
                run, tries = _take_smaller(attempt, run, seen, budget, tries)  # noqa: PLW2901
            whole_s = None if run.step_s is None else attempt.whole_s(run.step_s)
            done = _write_measured(run.plan, run.peak_bytes, whole_s, budget, limit)
            run.learned.keep()
            return _Corrected(attempt=attempt, plan=done, tries=tries, applied=run.applied, seen=seen)
        run.applied.remove()
        if fits:  # other stages of a pipeline do not, and ask for plans
            plan = attempt.keep(plan)
            continue
        assert limit is not None
        measured = run.peak_bytes
        peaks += [] if measured is None else [measured]
        over = int(limit * _UNKNOWN) if measured is None else max(measured - plan.peak_bytes, measured - limit)
        wanted = (limit if isinstance(wanted, str) else wanted) - over - int(limit * _EXTRA)
        took = "more than the device has" if measured is None else format_bytes(measured)
        _log.info(
            "recollect.fit: the step took %s with a budget of %s; planning again for %s",
            took,
            format_bytes(limit),
            format_bytes(wanted),
        )
        tried.add(plan.digest)
        plan = _plan_tighter(attempt, wanted, limit, min(peaks, default=None), refusal, tried)
    least = min(peaks, default=None)
    message = (
        f"none of the {_MOST_TRIES} plans that were tried stayed within {format_bytes(limit or 0)}: the smallest peak "
        f"was {'more than the device has' if least is None else format_bytes(least)}.\n"
        "Raise the budget, or shrink the batch"
    )
    raise BudgetError(message, least or plan.peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A step under a plan, which is in force.

    Attributes:
        plan: this.
        applied: takes it away.
        peak_bytes: the largest peak on all processes; None if memory ran out.
        step_s: how long it took here.
        learned: what its regions know by now, so that the user's first step need not learn again.
    """

    plan: Plan
    applied: Applied
    peak_bytes: int | None
    step_s: float | None
    learned: Learned


def _run(attempt: Attempt, plan: Plan, seen: SeenShapes) -> _Run:
    ranks = attempt.subject.ranks
    ranks.check_same("plan", plan.digest)
    applied = apply(attempt.subject.model, plan)
    learned = Learned()
    try:
        with seen.watching(attempt.subject.model):
            mine, seconds = attempt.run.measure(learned)
        return _Run(plan=plan, applied=applied, peak_bytes=ranks.largest(mine), step_s=seconds, learned=learned)
    except BaseException:
        applied.remove()
        raise


def _take_smaller(attempt: Attempt, run: _Run, seen: SeenShapes, budget: int | str, tries: int) -> tuple[_Run, int]:
    """The smallest peak, if that was asked for: where a plan missed it, full recomputation is run, too."""
    took = run.peak_bytes
    is_missed = took is None or not run.plan.regions or took > run.plan.peak_bytes * (1 + _MISSED)
    missed = budget == SMALLEST and is_missed
    full = attempt.plan_full(budget) if not attempt.subject.ranks.all(not missed) else None
    if full is None:
        return run, tries
    run.applied.remove()
    other = _run(attempt, full, seen)
    if other.peak_bytes is not None and (took is None or other.peak_bytes < took):
        return other, tries + 1
    other.applied.remove()
    return replace(run, applied=apply(attempt.subject.model, run.plan)), tries + 1


def _plan_tighter(  # noqa: PLR0917 (the last two are for the refusal)
    attempt: Attempt, wanted: int, limit: int, measured: int | None, refusal: BudgetError | None, tried: set[str]
) -> Plan:
    took = "memory ran out" if measured is None else f"the step took {format_bytes(measured)}"
    if refusal is not None:
        message = f"{refusal}.\nPredictions can be wrong, so full recomputation was run: {took}"
        raise BudgetError(message, min(refusal.smallest_bytes, measured or refusal.smallest_bytes))
    try:
        return attempt.plan_tighter(wanted, limit, tried)
    except BudgetError as error:
        _, _, predicted = str(error).partition(": ")
        message = (
            f"no plan fits {format_bytes(limit)}: {took} under the best plan that ran, and no plan is tighter.\n"
            f"The prediction was lower: {predicted}"
        )
        raise BudgetError(message, error.smallest_bytes) from None


def _write_measured(
    plan: Plan, measured: int | None, seconds: float | None, budget: int | str, limit: int | None
) -> Plan:
    assert plan.forecast is not None
    text = plan.forecast.budget if limit is None else budget if isinstance(budget, str) else format_bytes(limit)
    forecast = replace(
        plan.forecast, measured_peak_bytes=measured, measured_step_s=seconds, budget=str(text), budget_bytes=limit
    )
    asked_for, _, _ = plan.name.rpartition(" within ")  # a tightened plan is still one for the budget
    return replace(plan, forecast=forecast, name=f"{asked_for} within {text}" if asked_for else plan.name)
