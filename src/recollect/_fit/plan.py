"""Plan: a profile and a budget in, the best choice for every value out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Never

from recollect._core.argument_text import short_repr
from recollect._core.errors import BudgetError
from recollect._core.forecasts import CurvePoint, Forecast
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.spelling import options_of, refuse_unknown
from recollect._fit.refusal import describe_call, explain_refusal
from recollect._fit.standard import FULL
from recollect._fit.work import Work, find_margin_share, find_speed, work_for
from recollect._plan.budget import FASTEST, SMALLEST, Budget, parse_budget
from recollect._plan.frontier import Frontier, Point
from recollect._plan.idle import describe_idle, find_idle, plan_idle
from recollect._plan.solvers.highs import import_scipy
from recollect._plan.tiers import read_tiers
from recollect._plan.write import take_fingerprint, write_choices, write_regions

_IN_WORDS = {SMALLEST: "at the smallest peak", FASTEST: "as the plain step"}
"""What a plan is called whose budget is not a size."""
_FRAGMENTATION = 0.03


def plan(
    profile: Profile,
    *misplaced: Never,
    budget: int | str | Plan,
    tiers: str | Sequence[str] | None = None,
    link_bytes_per_s: float | None = None,
    name: str = "",
    progress: Callable[[int, int], None] | None = None,
    **unknown: Never,
) -> Plan:
    """Choose for every value of a step whether to keep or recompute it, so that the step stays within a budget.

    The first plan of a profile takes seconds; further budgets for the same profile object take milliseconds, and the
    predicted time never rises with the budget. The profile must be one of the plain step, real or dry.

    Args:
        profile: a profile of the step without regions; see `recollect.profile`.
        misplaced: must be empty; options are passed by name.
        budget: the most device memory that tensors may hold at any time of the whole step, parameters, gradients and
            optimizer state included, as ``torch.cuda.max_memory_allocated`` counts it: bytes, text like ``"40GiB"``, a
            share of the device like ``"80%"``, ``"min"`` for the smallest peak, ``"fastest"`` for the plain step. Or
            another plan, to make it again with the same request when it no longer fits its model.
        tiers: where values may wait, as far as the link can carry them during the computation: ``"host"`` memory,
            ``"disk"``, or ``("host", "disk")`` for disk when the host is full. By default everything stays.
        link_bytes_per_s: the speed of that link; by default measured, or, for a device you do not have, that of its
            generation of PCIe.
        name: what reports call the plan; by default the model and the budget.
        progress: a function, called now and then with the number of candidates judged and the least number to judge.
        unknown: there are no other options; the error says which one is probably meant.

    Returns:
        The plan, with its predictions; `recollect.apply` applies it to the model.

    Raises:
        BudgetError: no plan fits; it says what the smallest peak is, what sets it, and what would lower it.
        ValueError: the budget or `tiers` cannot be read, or the profile is not one of a plain step with a backward.
        TypeError: `profile` is something else, such as the model, or an option is unknown.
        OffloadError: `tiers` names the disk, and it cannot be written.
        ImportError: scipy, whose HiGHS solver makes the plans, cannot be imported.

    >>> import torch, recollect
    >>> from torch.nn import GELU, Linear, Sequential
    >>> model = Sequential(*(Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(4)))
    >>> seen = recollect.profile(model, torch.randn(512, 64))
    >>> made = recollect.plan(seen, budget=seen.peak_bytes * 6 // 10)
    >>> made.peak_bytes <= seen.peak_bytes * 6 // 10
    True
    >>> with recollect.apply(model, made):
    ...     model(torch.randn(512, 64)).sum().backward()
    >>> recollect.plan(seen, budget="1KiB")
    Traceback (most recent call last):
    ...
    recollect.BudgetError: no plan fits 1.00 KiB ...: the smallest reachable peak is ... MiB, at ...
    """
    if unknown:
        refuse_unknown("recollect.plan", unknown, options_of(plan))
    if misplaced:
        message = "recollect.plan takes only the profile by position: pass options by name, as in budget='40GiB'"
        raise TypeError(message)
    if not isinstance(profile, Profile):
        found = type(profile).__name__
        message = (
            f"recollect.plan expects a Profile, as recollect.profile(model, batch) returns it, not {found}. To read "
            "one from a file: recollect.Profile.from_json(path.read_text()); to plan and apply at once: recollect.fit"
        )
        raise TypeError(message)
    if not isinstance(name, str):
        message = f"name={short_repr(name)}: expected a string, the name of the plan in reports"
        raise TypeError(message)
    if progress is not None and not callable(progress):
        message = f"progress={short_repr(progress)}: expected a function of two numbers"
        raise TypeError(message)
    if tiers is None and link_bytes_per_s is not None:
        message = f"link_bytes_per_s={short_repr(link_bytes_per_s)} has no effect: nothing is offloaded. Pass tiers="
        raise ValueError(message)
    import_scipy()
    wanted = _read_wish(budget) if isinstance(budget, Plan) else budget
    asked = parse_budget(wanted, device_bytes=find_device_bytes(profile))
    works = [work_for(profile, None)]
    if tiers is not None:
        works.append(work_for(profile, find_speed(tiers, profile, link_bytes_per_s)))
    found = [
        _Found(work=work, point=point, margin_bytes=margin)
        for work in works
        for margin in [int((asked.bytes or 0) * find_margin_share(profile, sends=work is not works[0]))]
        if (point := _choose(work.frontier(progress), asked, margin)) is not None
    ]
    if not found:
        smallest = min((work for work in works), key=lambda work: work.frontier().smallest.peak_bytes)
        point = smallest.frontier().smallest
        margin = int((asked.bytes or 0) * find_margin_share(profile, sends=smallest is not works[0]))
        raise BudgetError(explain_refusal(smallest.problem, point, asked, margin), point.peak_bytes)
    if asked.text == SMALLEST:
        best = min(found, key=lambda one: (_find_least_budget(profile, one, works), one.point.step_s))
    else:  # what sends nothing away needs less of a margin
        best = min(found, key=lambda one: (one.point.step_s, one.point.peak_bytes))
    tier = "" if tiers is None else read_tiers(tiers)
    return _write(best.work, best.point, asked, best.margin_bytes, name, tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What is chosen with or without a link, and how much of the budget stays free for what a profile does not see."""

    work: Work
    point: Point
    margin_bytes: int


def _find_least_budget(profile: Profile, found: _Found, works: Sequence[Work]) -> float:
    """The smallest budget that what was chosen fits, with its margin: where values are sent that is larger."""
    return found.point.peak_bytes / (1 - find_margin_share(profile, sends=found.work is not works[0]))


def _choose(frontier: Frontier, asked: Budget, margin_bytes: int) -> Point | None:
    if asked.text == FASTEST:
        return frontier.points[0]
    if asked.text == SMALLEST:
        return frontier.smallest
    assert asked.bytes is not None
    return frontier.fastest_within(asked.bytes - margin_bytes)


def plan_full(profile: Profile, *, budget: int | str) -> Plan | None:
    """Full recomputation of the repeated blocks, as a plan for a budget, whatever its peak; None without such blocks.

    For what a simulated step tells wrong: this is the simplest of all plans, and measuring it settles the matter.
    """
    work = work_for(profile, None)
    known = [point for point in work.frontier().candidates if point.name == FULL and point.choice]
    if not known:
        return None
    asked = parse_budget(budget, device_bytes=find_device_bytes(profile))
    return _write(work, min(known, key=lambda point: point.peak_bytes), asked, 0, "", "")


def plan_least(profile: Profile, *, budget: int | str) -> Plan | None:
    """The plan with the smallest peak, if that is within a budget, with no margin: the step shows whether it fits."""
    asked = parse_budget(budget, device_bytes=find_device_bytes(profile))
    work = work_for(profile, None)
    point = work.frontier().smallest
    if asked.bytes is None or point.peak_bytes > asked.bytes:
        return None
    return _write(work, point, asked, 0, "", "")


def _read_wish(plan: Plan) -> int | str:
    """What a plan was asked for.

    Raises:
        ValueError: it was written by hand.
    """
    told = plan.forecast
    if told is None:
        message = f"plan {plan.name!r} was written by hand and has no budget: give one, as in budget='40GiB'"
        raise ValueError(message)
    return told.budget if told.budget_bytes is None else told.budget_bytes


def find_device_bytes(profile: Profile) -> int | None:
    """How much memory a profile's device has; None if it does not say."""
    if profile.capacity_bytes:
        return profile.capacity_bytes
    return profile.allocators[0].total_bytes if profile.allocators else None


def _write(work: Work, point: Point, asked: Budget, margin: int, name: str, tier: str) -> Plan:  # noqa: PLR0917
    problem, frontier = work.problem, work.frontier()
    profile = problem.plain
    limit = point.peak_bytes if asked.bytes is None else asked.bytes - margin
    entry = profile.allocators[0] if profile.allocators else None
    loose = entry.reserved_bytes / entry.peak_bytes - 1 if entry is not None and entry.peak_bytes else _FRAGMENTATION
    has_allocator = entry is not None or profile.rounding_bytes > 1
    choices, regions = list(write_choices(problem, point.choice)), list(write_regions(problem, point.choice, tier))
    idle = find_idle(problem, regions)
    idle_regions, idle_choices = plan_idle(problem, idle, choices)
    return Plan(
        name=name or f"{profile.name} {_IN_WORDS.get(asked.text, f'within {asked.text}')}".strip(),
        choices=(*choices, *idle_choices),
        regions=(*regions, *idle_regions),
        forecast=Forecast(
            peak_bytes=point.peak_bytes,
            step_s=point.step_s,
            plain_peak_bytes=profile.peak_bytes,
            plain_step_s=problem.plain_s,
            lower_bound_s=work.bound.seconds(limit),
            budget=asked.text,
            budget_bytes=asked.bytes,
            margin_bytes=margin,
            allowance_bytes=int(point.peak_bytes * loose) if has_allocator else 0,
            floor_bytes=frontier.smallest.peak_bytes,
            peak_at=describe_call(problem, point.peak_call),
            curve=tuple(CurvePoint(peak_bytes=one.peak_bytes, step_s=one.step_s) for one in frontier.points),
            policies=tuple(
                CurvePoint(peak_bytes=one.peak_bytes, step_s=one.step_s, name=one.name) for one in frontier.standard
            ),
        ),
        fingerprint=take_fingerprint(profile),
        notes=(*profile.notes, *describe_idle(idle)),
    )
