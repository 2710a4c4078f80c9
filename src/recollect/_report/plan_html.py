"""A plan as one page for a browser: the frontier, a budget to slide, memory before and after. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect._core.alternatives import Alternative, MemoryTrack
from recollect._core.forecasts import PlannedRegion
from recollect._core.plan_text import fold_regions
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._report.page_file import write_page

_SCRIPTS = (
    "format.js",
    "table.js",
    "scales.js",
    "answer.js",
    "chart.js",
    "curves.js",
    "frontier.js",
    "plan.js",
)


def write_plan_html(
    plan: Plan, profile: Profile, alternatives: Sequence[Alternative], *, margin_share: float = 0.0
) -> str:
    """The page of a plan, as text to be written to a file in UTF-8.

    Args:
        plan: that a budget gave, with a forecast.
        profile: of the plain step, that it was made of.
        alternatives: what other budgets would give, highest peak first; the plan itself is added if it is not there,
            as one with levers is not, of which only the peak is known.
        margin_share: how far plans stay below a budget, as a part of it.

    Raises:
        ValueError: the plan was written by hand, and promises nothing.
    """
    peak_bytes, step_s = plan.peak_bytes, plan.step_s
    forecast = plan.forecast
    assert forecast is not None
    calls_s = [call.seconds or 0.0 for call in profile.calls]
    memory = MemoryTrack.of(profile.timeline.bytes_at, calls_s, forecast.plain_step_s)
    offered = list(alternatives)
    is_outline = all((one.peak_bytes, one.step_s) != (peak_bytes, step_s) for one in offered)
    if is_outline:
        at_most = MemoryTrack(ends_s=(step_s,), bytes=(peak_bytes,))
        offered.append(Alternative(peak_bytes=peak_bytes, step_s=step_s, regions=plan.regions, memory=at_most))
    offered.sort(key=lambda one: (one.step_s, -one.peak_bytes))
    measured = forecast.measured_peak_bytes
    data = {
        "name": plan.name or "A plan",
        "device": profile.device,
        "optimizer": profile.optimizer,
        "torch": profile.torch,
        "is_dry": profile.is_dry,
        "source": profile.clock.value if profile.clock else "without times",
        "asked_bytes": forecast.budget_bytes,
        "margin_share": margin_share,
        "chosen": next(at for at, one in enumerate(offered) if (one.peak_bytes, one.step_s) == (peak_bytes, step_s)),
        "is_outline": is_outline,
        "levers": [str(lever) for lever in plan.levers],
        "plain": _encode_point(forecast.plain_peak_bytes, forecast.plain_step_s, memory),
        "alternatives": [
            {**_encode_point(one.peak_bytes, one.step_s, one.memory), "regions": _encode_regions(one.regions)}
            for one in offered
        ],
        "policies": [
            {"name": one.name, "peak_bytes": one.peak_bytes, "step_s": one.step_s} for one in forecast.policies
        ],
        "measured": None
        if measured is None
        else {"peak_bytes": measured, "step_s": forecast.measured_step_s or step_s},
        "notes": list(plan.notes),
    }
    return write_page(
        "plan",
        title=f"{plan.name or 'A plan'}: {format_bytes(peak_bytes)} at the peak",
        headline=f"Peak {format_bytes(peak_bytes)} of {format_bytes(forecast.plain_peak_bytes)}, "
        f"step {forecast.overhead:+.1%}.",
        scripts=_SCRIPTS,
        data=data,
    )


def _encode_point(peak_bytes: int, step_s: float, memory: MemoryTrack) -> dict[str, Any]:
    return {
        "peak_bytes": peak_bytes,
        "step_s": step_s,
        "ends_s": [float(f"{end:.6g}") for end in memory.ends_s],
        "kib": [size // 1024 for size in memory.bytes],
    }


def _encode_regions(regions: Sequence[PlannedRegion]) -> list[dict[str, Any]]:
    return [
        {
            "path": one.path,
            "count": count,
            "kind": one.kind,
            "way": one.way,
            "keeps": one.keeps,
            "kept_bytes": one.kept_bytes,
            "plain_bytes": one.plain_bytes,
            "again_s": float(f"{one.again_s:.4g}"),
        }
        for one, count in fold_regions(regions)
    ]
