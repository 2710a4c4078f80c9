"""Plan: a profile and a budget in, the best choice for every value out."""

from __future__ import annotations

import functools
from collections.abc import Callable

from recollect._core.errors import BudgetError
from recollect._core.forecasts import CurvePoint, Forecast
from recollect._core.plans import Plan
from recollect._core.profiles import Clock, Profile
from recollect._fit.refusal import describe_call, explain_refusal
from recollect._fit.standard import list_standard
from recollect._plan.budget import FASTEST, SMALLEST, Budget, parse_budget
from recollect._plan.frontier import Frontier, Point, find_frontier
from recollect._plan.problem import Problem
from recollect._plan.solvers.bound import Bound
from recollect._plan.solvers.highs import import_scipy
from recollect._plan.write import take_fingerprint, write_choices, write_regions
from recollect._profile.links import measure_copies

_MARGIN_DEVICE, _MARGIN_DRY, _MARGIN_HOST = 0.01, 0.03, 0.002
_FRAGMENTATION = 0.03
_PCIE_BYTES_PER_S = 50e9  # generation 5; 25e9 before


def plan(
    profile: Profile,
    *,
    budget: int | str,
    tiers: str | None = None,
    link_bytes_per_s: float | None = None,
    name: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Choose for every value of a step whether it is kept or recomputed, so that the step stays within a budget.

    The first plan of a profile takes seconds; further budgets for the same profile object take milliseconds, and the
    predicted time never rises with the budget. The profile is that of the plain step, real or dry.

    Args:
        profile: of the step without any regions; see `recollect.profile`.
        budget: the most that tensors may have of the device at any time of the whole step, parameters, gradients and
            optimizer state included, as ``torch.cuda.max_memory_allocated`` counts it: bytes, text like ``"40GiB"``, a
            share of the device like ``"80%"``, ``"min"`` for the smallest peak, ``"fastest"`` for the plain step.
        tiers: ``"host"`` allows to send what whole modules save to host memory, as far as the link carries it beside
            the computation; by default everything stays or is recomputed.
        link_bytes_per_s: how fast that link is; by default measured, or for a device that is not here what PCIe of its
            time gives.
        name: what reports call the plan; by default the model and the budget.
        progress: called now and then with how many candidates were judged, and how many there are at least.

    Returns:
        The plan, with what it promises; `recollect.apply` puts it on the model.

    Raises:
        BudgetError: no plan fits; it says what the smallest peak is, what sets it, and what would lower it.
        ValueError: the budget or `tiers` cannot be read, or the profile is none of a plain step with a backward.
        ImportError: scipy, with whose HiGHS plans are solved, cannot be imported.

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
    recollect._core.errors.BudgetError: no plan fits 1.00 KiB ...: the smallest reachable peak is ... MiB, at ...
    """
    import_scipy()
    asked = parse_budget(budget, device_bytes=_find_device_bytes(profile))
    work = _work_for(profile, None if tiers is None else _find_speed(tiers, profile, link_bytes_per_s))
    frontier = work.frontier(progress)
    margin = _find_margin(profile, asked)
    if asked.text == FASTEST:
        point = frontier.points[0]
    elif asked.text == SMALLEST:
        point = frontier.smallest
    else:
        assert asked.bytes is not None
        found = frontier.fastest_within(asked.bytes - margin)
        if found is None:
            raise BudgetError(
                explain_refusal(work.problem, frontier.smallest, asked, margin), frontier.smallest.peak_bytes
            )
        point = found
    return _write(work, point, asked, margin, name)


class _Work:
    """What is worked out of one profile, for all budgets; lives with the profile."""

    def __init__(self, profile: Profile, link_bytes_per_s: float | None) -> None:
        self.problem = Problem(profile, link_bytes_per_s=link_bytes_per_s)
        self._frontier: Frontier | None = None

    def frontier(self, progress: Callable[[int, int], None] | None = None) -> Frontier:
        """All that is worth choosing."""
        if self._frontier is None:
            self._frontier = find_frontier(
                self.problem, candidates=functools.partial(list_standard, self.problem), progress=progress
            )
        return self._frontier

    @functools.cached_property
    def bound(self) -> Bound:
        return Bound(self.problem)


def _work_for(profile: Profile, link_bytes_per_s: float | None) -> _Work:
    key = f"plan {link_bytes_per_s}"
    work = profile.derived.get(key)
    if not isinstance(work, _Work):
        work = profile.derived[key] = _Work(profile, link_bytes_per_s)
    return work


def _find_speed(tiers: str, profile: Profile, said: float | None) -> float:
    """How fast values go to host memory and back; the slower way counts.

    Raises:
        ValueError: there is no such tier, or the speed is none.
    """
    if tiers != "host":
        message = f"tiers={tiers!r}: expected 'host', or None to send nothing away"
        raise ValueError(message)
    if profile.clock is Clock.HOST:
        message = f"tiers={tiers!r}: the step runs in host memory already, and sending values there frees nothing"
        raise ValueError(message)
    if said is not None:
        if said <= 0:
            message = f"link_bytes_per_s={said!r}: expected a number above 0"
            raise ValueError(message)
        return said
    known = profile.derived.get("link")
    if not isinstance(known, float):
        known = profile.derived["link"] = _measure_link(profile)
    return known


def _measure_link(profile: Profile) -> float:
    import torch

    if profile.is_dry or not torch.cuda.is_available():
        return _PCIE_BYTES_PER_S
    speeds = [link.bytes_per_s for link in measure_copies(torch.device("cuda")) if "pinned" in link.name]
    return min(speeds, default=_PCIE_BYTES_PER_S)


def _find_device_bytes(profile: Profile) -> int | None:
    if profile.capacity_bytes:
        return profile.capacity_bytes
    return profile.allocators[0].total_bytes if profile.allocators else None


def _find_margin(profile: Profile, budget: Budget) -> int:
    """How far to stay below a budget, for what a profile does not see."""
    share = _MARGIN_DRY if profile.is_dry else _MARGIN_HOST if profile.clock is Clock.HOST else _MARGIN_DEVICE
    return int((budget.bytes or 0) * share)


def _write(work: _Work, point: Point, asked: Budget, margin: int, name: str) -> Plan:
    problem, frontier = work.problem, work.frontier()
    profile = problem.profile
    limit = point.peak_bytes if asked.bytes is None else asked.bytes
    entry = profile.allocators[0] if profile.allocators else None
    loose = entry.reserved_bytes / entry.peak_bytes - 1 if entry is not None and entry.peak_bytes else _FRAGMENTATION
    has_allocator = entry is not None or profile.rounding_bytes > 1
    return Plan(
        name=name or f"{profile.name} within {asked.text}".strip(),
        choices=tuple(write_choices(problem, point.choice)),
        regions=tuple(write_regions(problem, point.choice)),
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
                CurvePoint(peak_bytes=one.peak_bytes, step_s=one.step_s, name=one.name)
                for one in frontier.candidates
                if one.name not in ("plain", "planned")
            ),
        ),
        fingerprint=take_fingerprint(profile),
        notes=profile.notes,
    )
