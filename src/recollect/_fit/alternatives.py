"""The plans along a profile's frontier, each with its memory over the step: what a page slides through."""

from __future__ import annotations

from collections.abc import Sequence

from recollect._core.alternatives import Alternative, MemoryTrack
from recollect._core.profiles import Profile
from recollect._fit.work import Work, find_speed, work_for
from recollect._plan.frontier import Frontier, Point
from recollect._plan.rehearse import rehearse
from recollect._plan.write import write_regions

_MOST = 48


def list_alternatives(profile: Profile, *, tiers: str | Sequence[str] | None = None) -> tuple[Alternative, ...]:
    """What budgets from the plain step's peak down to the smallest would give, highest peak first.

    Of very many the points are taken that peaks at even distances lead to, and those of the standard policies, so that
    each of these stands beside the plan that beats it; the first and the last are always there.

    Args:
        profile: of the plain step.
        tiers: as of `recollect.plan`.

    Raises:
        ValueError: as of `recollect.plan`.
    """
    work = work_for(profile, None if tiers is None else find_speed(tiers, profile, None))
    return tuple(_describe(work, point) for point in _thin_out(work.frontier()))


def _thin_out(frontier: Frontier) -> list[Point]:
    points = frontier.points
    if len(points) <= _MOST:
        return list(points)
    high, low = points[0].peak_bytes, points[-1].peak_bytes
    budgets = [low + (high - low) * number // (_MOST - 1) for number in range(_MOST)]
    budgets += [one.peak_bytes for one in frontier.standard]
    chosen = {next(at for at, point in enumerate(points) if point.peak_bytes <= budget) for budget in budgets}
    return [points[at] for at in sorted(chosen | {0, len(points) - 1})]


def _describe(work: Work, point: Point) -> Alternative:
    problem = work.problem
    treated = [pair for segment, option in point.choice for pair in option.treat(problem, segment)]
    played = rehearse(problem, treated)
    return Alternative(
        peak_bytes=point.peak_bytes,
        step_s=point.step_s,
        regions=tuple(write_regions(problem, point.choice)),
        memory=MemoryTrack.of(played.bytes_at.tolist(), [problem.seconds[call] for call in played.calls], point.step_s),
    )
