"""Ways to make a step fit, those that cost least first: values alone, with levers, and in micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recollect._apply.model import apply
from recollect._core.calls import Phase
from recollect._core.errors import BudgetError
from recollect._core.levers import CHUNKED_LOSS, MICRO_BATCHES, PlannedLever
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.spelling import spell_lever, spell_levers
from recollect._fit.batches import Invocation
from recollect._fit.gradients import GradientNorms
from recollect._fit.levers import Asked, SeenInputs, list_candidates, plan_levers
from recollect._fit.micro_batches import count_examples, find_weight, refuse_batch_norms, split_batch
from recollect._fit.plan import find_device_bytes
from recollect._fit.plan import plan as make_plan
from recollect._fit.plan import plan_full as make_full_plan
from recollect._fit.plan import plan_least as make_least_plan
from recollect._fit.ranks import Ranks
from recollect._fit.run import Runner
from recollect._fit.steps import Steps
from recollect._fit.suggestions import suggest_levers
from recollect._fit.work import take_measured, work_for
from recollect._plan.budget import SMALLEST, parse_budget
from recollect._plan.solvers.bound import find_lasting_bytes, find_least_bytes

_log = logging.getLogger("recollect")

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to fit.

    Attributes:
        model: whose modules may become regions.
        batch: as the user gave it; of a loader the largest.
        loss: likewise.
        call: the step with this batch.
        owns_step: whether it is the model that is called, and not a step of the user's.
        optimizer: whose state and step are counted.
        tiers: as of `recollect.plan`.
        progress: called now and then.
        ranks: the processes that train together.
    """

    model: nn.Module
    batch: Any
    loss: Callable[..., Tensor] | None
    call: Invocation
    owns_step: bool
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None
    tiers: str | Sequence[str] | None
    progress: Progress | None
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A way to make a step fit.

    Attributes:
        subject: what is to fit.
        run: runs it, or one of its micro-batches.
        profile: of that, with the levers.
        plain: of the step without them.
        levers: what is done beyond values.
        parts: how many times `run` runs in a step.
        weight: what the loss of each is multiplied with.
        gradients: how large they are in the step with the levers, by parameter; empty if nobody looked.
        plain_gradients: likewise, without them.
    """

    subject: Subject
    run: Runner
    profile: Profile
    plain: Profile
    levers: tuple[PlannedLever, ...] = ()
    parts: int = 1
    weight: float = 1.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    plain_gradients: Mapping[str, float] = field(default_factory=dict)

    def plan(self, budget: int | str) -> Plan:
        """The best plan within a budget, the same on all processes with this model.

        Raises:
            BudgetError: there is none.
        """
        return self.subject.ranks.decide(lambda: self._plan(budget))

    def plan_tighter(self, budget: int, limit: int, tried: Collection[str]) -> Plan:
        """The best plan within a budget that is below the limit; if there is none, the one with the smallest peak.

        A plan that took more than was predicted says little about others: before nothing is left, that one is run, and
        then full recomputation, whatever is predicted of it.

        Args:
            budget: what to plan for.
            limit: what the step may take.
            tried: digests of the plans that took more.

        Raises:
            BudgetError: there is none, and the smallest was run, or is too large, and full recomputation was run.
        """
        return self.subject.ranks.decide(lambda: self._plan_tighter(budget, limit, tried))

    def _plan_tighter(self, budget: int, limit: int, tried: Collection[str]) -> Plan:
        try:
            return self._plan(max(budget, 1))
        except BudgetError:
            smallest = self._plan(SMALLEST)
            if smallest.peak_bytes <= limit and smallest.digest not in tried:
                return smallest
            full = self._plan_full(limit)
            if full is None or full.digest in tried:
                raise
            return full

    def plan_full(self, budget: int | str) -> Plan | None:
        """Full recomputation of the repeated blocks, whatever its peak; None if there are none."""
        return self.subject.ranks.decide(lambda: self._plan_full(budget))

    def _plan_full(self, budget: int | str) -> Plan | None:
        made = make_full_plan(self.profile, budget=budget)
        return made if made is None else self._add_levers(made)

    def plan_least(self, budget: int | str) -> Plan | None:
        """The plan with the smallest peak, if that is within a budget but for its margin; None if it is not."""
        return self.subject.ranks.decide(lambda: self._plan_least(budget))

    def _plan_least(self, budget: int | str) -> Plan | None:
        made = make_least_plan(self.profile, budget=budget)
        return made if made is None else self._add_levers(made)

    def cannot_fit(self, budget: int | str) -> bool:
        """Whether no plan can be within a budget, as far as can be told without a search; all processes agree."""
        return self.subject.ranks.decide(lambda: self._cannot_fit(budget))

    def _cannot_fit(self, budget: int | str) -> bool:
        limit = parse_budget(budget, device_bytes=find_device_bytes(self.profile)).bytes
        if limit is None:
            return False
        return find_least_bytes(work_for(self.profile, None).problem) > limit

    def keep(self, plan: Plan) -> Plan:
        """The same plan, while other processes may ask for another."""
        return self.subject.ranks.decide(lambda: plan)

    def _plan(self, budget: int | str) -> Plan:
        return self._add_levers(
            make_plan(self.profile, budget=budget, tiers=self.subject.tiers, progress=self.subject.progress)
        )

    def _add_levers(self, made: Plan) -> Plan:
        if not self.levers:
            return made
        assert made.forecast is not None
        bound = made.forecast.lower_bound_s
        forecast = replace(
            made.forecast,
            plain_peak_bytes=self.plain.peak_bytes,
            plain_step_s=sum(call.seconds or 0.0 for call in self.plain.calls),
            step_s=self.whole_s(made.forecast.step_s),
            lower_bound_s=None if bound is None else self.whole_s(bound),
            curve=tuple(replace(point, step_s=self.whole_s(point.step_s)) for point in made.forecast.curve),
            policies=tuple(replace(point, step_s=self.whole_s(point.step_s)) for point in made.forecast.policies),
        )
        return replace(made, forecast=forecast, levers=self.levers)

    def whole_s(self, seconds: float) -> float:
        """How long the step takes if what `run` runs takes so long: all parts, and the optimizer once."""
        if self.parts == 1:
            return seconds
        once = sum(call.seconds or 0.0 for call in self.profile.calls if call.phase is Phase.OPTIMIZER)
        return (seconds - once) * self.parts + once

    def make_steps(self) -> Steps | None:
        """What runs forward and backward for the user; None if the user does."""
        subject = self.subject
        if not subject.owns_step:
            return None
        return Steps(subject.model, subject.loss, parts=self.parts, weight=self.weight)


def choose_attempt(subject: Subject, asked: Asked, budget: int | str) -> tuple[Attempt, Plan, BudgetError | None]:
    """The quickest way, as predicted, to keep a step within a budget; micro-batches only if no other does.

    For the smallest peak all levers are tried but micro-batches, with which there would be no end. If no way is found,
    there is the smallest plan, if it leaves no margin but fits, or full recomputation, and why nothing better: a
    prediction may be too high, so the step decides.

    Raises:
        BudgetError: none does, and full recomputation cannot.
    """
    inputs = SeenInputs()
    run = Runner(subject.model, subject.call, subject.optimizer, progress=subject.progress)
    gradients = _find_norms(subject, asked)
    with inputs.watching(list_candidates(subject.model, asked)):
        seen = run.profile_plainly(gradients)
    found: tuple[Attempt, Plan] | None = None
    refusals: list[BudgetError] = []
    wants_least = budget == SMALLEST
    norms = {} if gradients is None else gradients.read()
    attempt = last = Attempt(subject=subject, run=run, profile=seen, plain=seen, plain_gradients=norms)
    for tried in _list_attempts(attempt, inputs, asked):
        is_enough = tried.parts > 1 if wants_least else not _is_cheap(tried.levers)
        if found is not None and (is_enough or (not found[1].regions and not wants_least)):
            break
        last = tried
        if asked and tried.cannot_fit(budget):
            continue
        try:
            plan = tried.plan(budget)
        except BudgetError as error:
            refusals.append(error)
            continue
        if found is None or (plan.peak_bytes < found[1].peak_bytes if wants_least else plan.step_s < found[1].step_s):
            found = (tried, plan)
    if found is not None:
        return *found, None
    try:
        return last, last.plan(budget), None  # if it was passed over, the refusal tells of it
    except BudgetError as error:
        refusals.append(error)
    if not attempt.cannot_fit(budget) and (least := attempt.plan_least(budget)) is not None:
        return attempt, least, None
    refusal = _with_suggestion(attempt, asked, budget, min(refusals, key=lambda error: error.smallest_bytes))
    full = None if attempt.cannot_fit(budget) else attempt.plan_full(budget)
    if full is None:
        raise refusal
    return attempt, full, refusal


def _with_suggestion(plain: Attempt, asked: Asked, budget: int | str, refusal: BudgetError) -> BudgetError:
    """The refusal, and which levers nobody has asked for yet, where any can help."""
    subject = plain.subject
    limit = parse_budget(budget, device_bytes=find_device_bytes(plain.profile)).bytes
    lasting = find_lasting_bytes(work_for(plain.profile, None).problem)
    if not subject.ranks.are_alone or (limit is not None and lasting > limit):
        return refusal
    more = [suggest_levers(subject.model, plain.profile, asked, subject.batch, owns_step=subject.owns_step)]
    if CHUNKED_LOSS in asked and spell_levers([CHUNKED_LOSS]) in str(refusal):  # it was allowed, and yet is advised
        more.insert(
            0,
            f"But {spell_lever(CHUNKED_LOSS)} was allowed, and saves nothing in this step: for that, the logits have "
            "to come from a torch.nn.Linear and go to cross_entropy",
        )
    return BudgetError(".\n".join([str(refusal), *filter(None, more)]), refusal.smallest_bytes)


def _is_cheap(levers: tuple[PlannedLever, ...]) -> bool:
    """Whether levers may be quicker than recomputing without them: running a part of every block again is not."""
    return all(lever.name == CHUNKED_LOSS for lever in levers)


def _list_attempts(first: Attempt, inputs: SeenInputs, asked: Asked) -> Iterator[Attempt]:
    """The ways there are, one by one: each is profiled only when it is asked for."""
    yield first
    subject = first.subject
    chosen: tuple[PlannedLever, ...] = ()
    ranks = subject.ranks
    for lever in ranks.decide(lambda: plan_levers(subject.model, first.plain, inputs, asked)).values():
        chosen = (*chosen, lever)
        gradients = _find_norms(subject, asked)
        with apply(subject.model, Plan(levers=chosen)):
            seen = first.run.profile_plainly(gradients)
        take_measured(seen, first.plain)
        norms = {} if gradients is None else gradients.read()
        yield replace(first, profile=seen, levers=chosen, gradients=norms)
    if MICRO_BATCHES in asked:
        yield from _list_micro_batches(replace(first, levers=chosen), asked[MICRO_BATCHES])


def _find_norms(subject: Subject, asked: Asked) -> GradientNorms | None:
    """What notes gradients while a step is profiled, if they may have to be compared.

    Not among several processes: where memory runs out on one of them, it alone would have none.
    """
    is_compared = any(name != MICRO_BATCHES for name in asked) and subject.ranks.are_alone
    return GradientNorms(subject.model) if is_compared else None


def _list_micro_batches(base: Attempt, said: int | None) -> Iterator[Attempt]:
    subject = base.subject
    refuse_batch_norms(subject.model)
    examples = count_examples(subject.batch)
    counts = [parts for parts in range(2, examples + 1) if examples % parts == 0] if said is None else [said]
    for parts in counts:
        weight = _find_weight(subject, parts)
        steps = Steps(subject.model, subject.loss, parts=parts, weight=weight)
        part = split_batch(subject.batch, parts)[0]
        call = Invocation(function=lambda one, steps=steps: steps.run_part(one), args=(part,))
        run = Runner(subject.model, call, subject.optimizer, has_gradients=True, progress=subject.progress)
        with apply(subject.model, Plan(levers=base.levers)):
            seen = run.profile_plainly()
        take_measured(seen, base.plain)
        lever = PlannedLever(name=MICRO_BATCHES, parts=parts)
        yield replace(base, run=run, profile=seen, levers=(*base.levers, lever), parts=parts, weight=weight)


def _find_weight(subject: Subject, parts: int) -> float:
    weight = subject.ranks.together(lambda: find_weight(subject.model, subject.batch, subject.loss, parts))
    subject.ranks.check_same("weight of micro-batches", str(weight))
    return weight
