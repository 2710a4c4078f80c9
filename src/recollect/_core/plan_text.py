"""A plan as a table, block by block, in text and in HTML. Plain data in; no torch here."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import replace

from recollect._core.forecasts import Forecast, PlannedRegion
from recollect._core.levers import PlannedLever
from recollect._core.numbers import format_change
from recollect._core.units import count_noun, format_bytes

_HEAD = ("regions", "class", "how", "kept", "holds", "plain", "again")


def describe_plan(
    name: str,
    regions: Sequence[PlannedRegion],
    forecast: Forecast | None,
    choices: int,
    levers: Sequence[PlannedLever] = (),
) -> str:
    """The plan in lines of text."""
    lines = [_head(name, regions, forecast, choices)]
    if forecast is not None:
        lines += describe_forecast(forecast)
    lines += [f"lever {lever}" for lever in levers]
    if regions:
        rows = [_HEAD, *make_rows(regions)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def name_plan(name: str, regions: Sequence[PlannedRegion], forecast: Forecast | None, choices: int) -> str:
    """The plan in one line."""
    peak = "" if forecast is None else f", peak {format_bytes(forecast.peak_bytes)}"
    return _head(name, regions, forecast, choices) + peak


def _head(name: str, regions: Sequence[PlannedRegion], forecast: Forecast | None, choices: int) -> str:
    return f"plan {name}".rstrip() + (
        f": {_count(regions)}" if forecast or regions else f": {count_noun(choices, 'choice')}"
    )


def plan_as_html(
    name: str,
    regions: Sequence[PlannedRegion],
    forecast: Forecast | None,
    choices: int,
    levers: Sequence[PlannedLever] = (),
) -> str:
    """The plan as a fragment of HTML, for notebooks."""
    said = describe_plan(name, (), forecast, choices, levers).splitlines() if forecast else [f"plan {name}"]
    head = "".join(f"<th style='text-align:left'>{html.escape(word)}</th>" for word in _HEAD)
    body = "".join(
        f"<tr>{''.join(f'<td style=text-align:left>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in make_rows(regions)
    )
    first = html.escape(f"{said[0].split(':')[0]}: {_count(regions)}")
    text = "<br>".join([f"<b>{first}</b>", *map(html.escape, said[1:])])
    return f"<div><p>{text}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def describe_forecast(forecast: Forecast) -> list[str]:
    """What it promises, and what was measured, in lines."""
    peak, plain = forecast.peak_bytes, forecast.plain_peak_bytes
    lines = [
        f"peak {format_bytes(peak)}, {peak / plain:.0%} of the plain step's {format_bytes(plain)}"
        + (f"; budget {forecast.budget}" if forecast.budget else "")
        + (f"; at {forecast.peak_at}" if forecast.peak_at else "")
    ]
    time = f"step {_format_s(forecast.step_s)}, {format_change(forecast.overhead)} over the plain step's "
    time += _format_s(forecast.plain_step_s)
    if forecast.lower_bound_s is not None and forecast.gap is not None:
        least = format_change(forecast.overhead - forecast.gap)
        time += f"; no plan that only recomputes can beat {least}, {_format_s(forecast.lower_bound_s)}"
    lines.append(time)
    if forecast.allowance_bytes:
        lines.append(
            f"reserved by the allocator: up to {format_bytes(peak + forecast.allowance_bytes)}, including "
            f"{format_bytes(forecast.allowance_bytes)} for fragmentation"
        )
    if forecast.measured_peak_bytes is not None:
        off = forecast.measured_peak_bytes / peak - 1
        measured = f"measured peak {format_bytes(forecast.measured_peak_bytes)}"
        lines.append(f"{measured}, {format_change(off)} against the prediction")
    if forecast.measured_step_s is not None:
        off = forecast.measured_step_s / forecast.step_s - 1 if forecast.step_s else 0.0
        lines.append(
            f"measured step {_format_s(forecast.measured_step_s)}, {format_change(off)} against the prediction"
        )
    return lines


def make_rows(regions: Sequence[PlannedRegion]) -> list[tuple[str, ...]]:
    """The lines of the table; neighbours that are treated the same share one."""
    return [
        (
            one.path,
            one.kind,
            describe_way(one),
            one.keeps or "nothing",
            format_bytes(one.kept_bytes),
            format_bytes(one.plain_bytes),
            _format_s(one.again_s),
        )
        for one, _ in fold_regions(regions)
    ]


def fold_regions(regions: Sequence[PlannedRegion]) -> list[tuple[PlannedRegion, int]]:
    """Neighbours that are treated the same as one, with the sum of their figures; and how many they are.

    >>> layers = [PlannedRegion(path=f"layers.{at}", kind="Block", way="rerun", kept_bytes=8) for at in range(3)]
    >>> [(one.path, one.kept_bytes, count) for one, count in fold_regions(layers)]
    [('layers.0-2', 24, 3)]
    """
    found = []
    for _, group in itertools.groupby(
        regions, key=lambda one: (_frame(one.path), one.kind, describe_way(one), one.keeps)
    ):
        same = list(group)
        whole = replace(
            same[0],
            path=_join([one.path for one in same]),
            kept_bytes=sum(one.kept_bytes for one in same),
            plain_bytes=sum(one.plain_bytes for one in same),
            offloaded_bytes=sum(one.offloaded_bytes for one in same),
            again_s=sum(one.again_s for one in same),
        )
        found.append((whole, len(same)))
    return found


def describe_way(region: PlannedRegion) -> str:
    """How its values come back, and from where, if they wait elsewhere.

    >>> describe_way(PlannedRegion(path="layers.0", kind="Block", way="serve", tier="host"))
    'serve from host'
    >>> describe_way(PlannedRegion(path="layers.1", kind="Block", way="rerun", joined_to="layers.0"))
    'rerun, joined'
    """
    way = f"{region.way} from {region.tier}" if region.tier else region.way
    return f"{way}, joined" if region.joined_to else way


def _count(regions: Sequence[PlannedRegion]) -> str:
    return f"{len(regions)} region{'' if len(regions) == 1 else 's'}" if regions else "nothing is recomputed"


def _frame(path: str) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() else part for part in path.split("."))


def _join(paths: list[str]) -> str:
    """Paths that differ in one number, from first to last.

    >>> _join(["layers.0", "layers.1", "layers.2"]), _join(["head"])
    ('layers.0-2', 'head')
    """
    if len(paths) == 1:
        return paths[0]
    first, last = paths[0].split("."), paths[-1].split(".")
    return ".".join(one if one == other else f"{one}-{other}" for one, other in zip(first, last, strict=True))


def _format_s(seconds: float) -> str:
    """Seconds for people.

    >>> _format_s(0.01234), _format_s(2.5), _format_s(0.0000123)
    ('12.3 ms', '2.50 s', '12.3 µs')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.1f} µs"  # noqa: PLR2004
