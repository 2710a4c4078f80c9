"""The step as a picture to be shared: a title, its numbers, the curve, and what modules keep. Needs matplotlib.

It has the colours of the page. Figures are made without pyplot: no window, no global state, no display needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from recollect._core.calls import Category, Phase
from recollect._core.families import Families
from recollect._core.numbers import format_seconds
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._report.answer import answer
from recollect._report.curve import find_stretches, follow_categories
from recollect._report.escaping import clip, spell_out
from recollect._report.palette import COLOURS, FAINT, INK, MORE, PAPER, PHASES, RULE, SOFT, STACK
from recollect._report.summary import find_peak, list_saved, sum_saved

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_SIZE = (12.0, 6.3)  # inches: the shape in which pages show pictures of links
_MOST_BARS = 12
_MOST_CALLS = 2000  # more than there are points across
_LONGEST_NAME, _LONGEST_TITLE, _LONGEST_LINE = 32, 48, 120
_LEAST_TICKS = 3
_NAMED = 0.1  # of the step's calls: a shorter phase has no room for its name
_NEAR = 2.5  # times the peak: a capacity beyond is not drawn, as it would press all else to the ground
_NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}
_BAND = 0.035  # of the height of the panel


def draw(profile: Profile, *, against: Profile | None = None) -> Figure:
    """The figure: this step as a stack, and the one that it is compared with as a curve over it.

    Args:
        profile: the step.
        against: what it is compared with, as the step before a change.

    >>> figure = draw(Profile(storages=(), calls=()))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['memory over the step', 'saved for backward, by module']
    """
    figure = Figure(figsize=_SIZE, facecolor=PAPER)
    memory, bars = figure.subplots(1, 2, width_ratios=(2.6, 1))
    figure.subplots_adjust(left=0.085, right=0.975, top=0.72, bottom=0.155, wspace=0.42)
    _write_head(figure, profile, against)
    _draw_memory(memory, profile, against)
    _draw_modules(bars, profile, against)
    _draw_legend(figure, profile, against)
    return figure


def _write_head(figure: Figure, profile: Profile, against: Profile | None) -> None:
    def write(y: float, text: str, *, size: float, color: str, weight: str = "normal") -> None:
        shown = spell_out(text)
        figure.text(0.03, y, shown, fontsize=size, color=color, fontweight=weight, va="top", parse_math=False)

    name = profile.name or "A training step"
    name = name if len(name) <= _LONGEST_TITLE else f"{name[: _LONGEST_TITLE - 1]}\N{HORIZONTAL ELLIPSIS}"
    write(0.95, name, size=22, color=INK, weight="bold")
    write(0.865, " \N{MIDDLE DOT} ".join(_list_numbers(profile, against)), size=12.5, color=SOFT)
    found = answer(profile)
    line = found.peak if found.fits is None else found.fit
    line = line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}\N{HORIZONTAL ELLIPSIS}"
    write(0.82, line, size=10.5, color=FAINT if found.fits in (None, True) else MORE)
    figure.text(0.975, 0.95, "recollect", fontsize=11, color=FAINT, ha="right", va="top")


def _list_numbers(profile: Profile, against: Profile | None) -> list[str]:
    def change(now: float, then: float | None) -> str:
        return f" ({now / then - 1:+.0%})".replace("-", "\N{MINUS SIGN}") if then else ""

    before = None if against is None else against.peak_bytes
    numbers = [f"peak {format_bytes(profile.peak_bytes)}{change(profile.peak_bytes, before)}"]
    if profile.step_s is not None:
        then = None if against is None else against.step_s
        numbers.append(f"step {format_seconds(profile.step_s)}{change(profile.step_s, then)}")
    numbers.append(f"{format_bytes(sum_saved(profile).most_bytes)} saved for backward")
    if profile.device:
        numbers.append(f"{'estimated for' if profile.is_dry else 'on'} {profile.device}")
    return numbers


def _draw_memory(axes: Axes, profile: Profile, against: Profile | None) -> None:
    axes.set_title("memory over the step", loc="left", fontsize=10, color=SOFT)
    _clear_frame(axes)
    peak, sizes = find_peak(profile), follow_categories(profile)
    if not sizes:
        return
    shown = _sample(profile.timeline.bytes_at)
    edges = [*shown, len(profile.calls)]
    edges[0] = 0
    below = [0] * len(edges)
    for category in STACK:
        if category in sizes:
            values = [sizes[category][number] for number in (*shown, shown[-1])]
            above = [low + high for low, high in zip(below, values, strict=True)]
            axes.fill_between(edges, below, above, step="post", color=COLOURS[category], linewidth=0)
            below = above
    axes.plot([peak.call + 0.5], [peak.bytes], "v", color=INK, markersize=5)
    highest = max(peak.bytes, _draw_curve(axes, against, len(profile.calls)))
    if 0 < profile.capacity_bytes < _NEAR * highest:
        _draw_capacity(axes, profile.capacity_bytes)
        highest = max(highest, profile.capacity_bytes)
    axes.margins(x=0)
    axes.set_xlim(0, len(profile.calls))
    axes.set_ylim(0, 1.15 * highest)
    _mark_phases(axes, profile)
    axes.set_xticks([])
    axes.set_xlabel("operator calls, first to last", fontsize=9, color=FAINT)
    _count_in_bytes(axes.yaxis, axes.get_ylim()[1])


def _draw_curve(axes: Axes, against: Profile | None, width: int) -> int:
    """Draw the step before as a curve, as wide as the step after: they may have more or fewer calls.

    Returns:
        Its peak.
    """
    if against is None or not against.calls:
        return 0
    shown = _sample(against.timeline.bytes_at)
    places = [number * width / len(against.calls) for number in (*shown, len(against.calls))]
    heights = [against.timeline.bytes_at[number] for number in (*shown, shown[-1])]
    axes.plot(places, heights, drawstyle="steps-post", color=INK, linewidth=1.6)
    return against.peak_bytes


def _draw_capacity(axes: Axes, capacity_bytes: int) -> None:
    axes.axhline(capacity_bytes, color=MORE, linestyle=(0, (5, 4)), linewidth=1.3)
    place = {"xy": (0.01, capacity_bytes), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    text = f"capacity {format_bytes(capacity_bytes)}"
    axes.annotate(text, xytext=(0, 3), color=MORE, fontsize=9, **place)  # type: ignore[arg-type]


def _clear_frame(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(length=0, colors=FAINT, labelsize=9)
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)


def _sample(sizes: Sequence[int]) -> list[int]:
    """The calls that are drawn: all, or of each few the one where most is in use, which keeps the peak."""
    width = -(-len(sizes) // _MOST_CALLS)
    starts = range(0, len(sizes), width)
    return [max(range(start, min(start + width, len(sizes))), key=sizes.__getitem__) for start in starts]


def _draw_modules(axes: Axes, profile: Profile, against: Profile | None) -> None:
    """Bars by module; what they kept before is an outline around them."""
    axes.set_title("saved for backward, by module", loc="left", fontsize=10, color=SOFT)
    _clear_frame(axes)
    bars = _sum_by_family(profile, against)
    for part in (Category.ACTIVATION, Category.LOSS_HEAD):
        values = [sizes.get(part, 0) for _, sizes, _ in bars]
        left = [sizes.get(Category.ACTIVATION, 0) if part is Category.LOSS_HEAD else 0 for _, sizes, _ in bars]
        axes.barh(range(len(bars)), values, left=left, color=COLOURS[part], height=0.7)
    if against is not None:
        axes.barh(range(len(bars)), [then for _, _, then in bars], fill=False, edgecolor=INK, height=0.7)
    axes.set_yticks(range(len(bars)), [clip(spell_out(name), _LONGEST_NAME) for name, _, _ in bars], fontsize=8.5)
    axes.grid(visible=False)
    _count_in_bytes(axes.xaxis, axes.get_xlim()[1])
    axes.tick_params(axis="x", labelrotation=30, labelsize=8)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.invert_yaxis()


def _sum_by_family(profile: Profile, against: Profile | None) -> list[tuple[str, dict[Category, int], int]]:
    """What modules keep, identical layers together, largest first, and what they kept before; the smallest as one."""
    sums = _sum_categories(profile)
    then = {} if against is None else {name: sum(one.values()) for name, one in _sum_categories(against).items()}
    rows = [(name, sums.get(name, {}), then.get(name, 0)) for name in dict.fromkeys((*sums, *then))]
    rows.sort(key=lambda row: -max(sum(row[1].values()), row[2]))
    if len(rows) <= _MOST_BARS:
        return rows
    rest: dict[Category, int] = {}
    for _, sizes, _ in rows[_MOST_BARS - 1 :]:
        for category, size in sizes.items():
            rest[category] = rest.get(category, 0) + size
    others = sum(was for _, _, was in rows[_MOST_BARS - 1 :])
    return [*rows[: _MOST_BARS - 1], (f"{len(rows) - _MOST_BARS + 1} others", rest, others)]


def _sum_categories(profile: Profile) -> dict[str, dict[Category, int]]:
    families = Families(profile.modules)
    sums: dict[str, dict[Category, int]] = {}
    for row in list_saved(profile):
        sizes = sums.setdefault(families.name(row.module) or "(model)", {})
        sizes[row.category] = sizes.get(row.category, 0) + row.bytes
    return sums


def _mark_phases(axes: Axes, profile: Profile) -> None:
    """A band along the top, as on the page."""
    stretches = find_stretches(profile)
    for phase, first, last in stretches:
        axes.axvspan(first, last, ymin=1 - _BAND, ymax=1, color=PHASES[phase], linewidth=0)
    # Recomputation comes and goes within backward: one name for both.
    named = [
        (Phase.BACKWARD if phase is Phase.RECOMPUTATION else phase, first, last) for phase, first, last in stretches
    ]
    for phase, group in itertools.groupby(named, key=lambda stretch: stretch[0]):
        parts = list(group)
        first, last = parts[0][1], parts[-1][2]
        if last - first > _NAMED * len(profile.calls):
            at = axes.get_xaxis_transform()  # calls across, and the height of the panel up
            start = first + 0.008 * len(profile.calls)
            axes.text(start, 1 - _BAND / 2, _NAMES[phase], transform=at, va="center", fontsize=7.5, color=INK)


def _draw_legend(figure: Figure, profile: Profile, against: Profile | None) -> None:
    sizes = follow_categories(profile)
    marks: list[Artist] = [Patch(color=COLOURS[part], label=part.value) for part in STACK if part in sizes]
    if against is not None and against.calls:
        marks.append(Line2D([], [], color=INK, linewidth=1.6, label="before"))
    if marks:
        figure.legend(
            handles=marks, loc="lower left", bbox_to_anchor=(0.02, 0.005), ncols=10, fontsize=9, frameon=False,
            labelcolor=SOFT, handlelength=1.1, columnspacing=1.4, handletextpad=0.5,
        )  # fmt: skip


def _count_in_bytes(axis: Axis, most: float) -> None:
    """Put ticks at whole powers of 2, where bytes are round."""
    step = 2.0 ** max(0, math.floor(math.log2(max(most, 1) / _LEAST_TICKS)))
    axis.set_major_locator(MultipleLocator(step))
    axis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size)).replace(".00", "")))
