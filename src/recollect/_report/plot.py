"""The step as a figure: memory over the step, stacked by what it is for, and what modules keep. Needs matplotlib.

Figures are made without pyplot: no window, no global state, no display needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from recollect._core.calls import Category, Phase
from recollect._core.families import Families
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes
from recollect._report.curve import find_stretches, follow_categories
from recollect._report.letters import clip, spell_out
from recollect._report.summary import find_peak, list_saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_WIDTH, _HEIGHT = 9.0, 3.6  # inches, of one pair of panels
_MOST_BARS = 12
_MOST_CALLS = 2000  # more than there are points across
_LONGEST_NAME = 32
_LEAST_TICKS = 3
_NAMED = 0.1  # of the step's calls: a shorter phase has no room for its name
_NAMES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimiser"}
_ORDER = (  # what stays is at the bottom
    Category.LIBRARY,
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER,
    Category.GRADIENT,
    Category.INPUT,
    Category.ACTIVATION,
    Category.LOSS_HEAD,
    Category.TEMPORARY,
)
# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by their order.
_COLOURS = dict(
    zip(
        _ORDER,
        ("#555555", "#0072b2", "#999999", "#56b4e9", "#009e73", "#cccccc", "#d55e00", "#cc79a7", "#f0e442"),
        strict=True,
    )
)
_SHADES = {Phase.BACKWARD: "#00000010", Phase.RECOMPUTATION: "#d55e0030", Phase.OPTIMIZER: "#0072b220"}


def draw(profile: Profile, *, against: Profile | None = None) -> Figure:
    """The figure. With `against`, that is above and this below, on one scale.

    Args:
        profile: the step.
        against: what it is compared with, as the step before a change.

    >>> figure = draw(Profile(storages=(), calls=()))
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['step: peak 0 B', 'saved for backward, by module']
    """
    steps = [profile] if against is None else [against, profile]
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(steps)), layout="constrained")
    grid = figure.subplots(len(steps), 2, squeeze=False, width_ratios=(2, 1), sharex="col")
    for axes in grid[1:, 0]:
        axes.sharey(grid[0, 0])
    words = [""] if against is None else ["before: ", "after: "]
    for step, (left, right), word in zip(steps, grid, words, strict=True):
        _draw_memory(left, step, word)
        _draw_modules(right, step)
    _draw_legend(figure, [follow_categories(step) for step in steps])
    return figure


def _draw_memory(axes: Axes, profile: Profile, word: str) -> None:
    peak, sizes = find_peak(profile), follow_categories(profile)
    name = clip(spell_out(profile.name or "step"), _LONGEST_NAME)
    title = f"{word}{name}: peak {format_bytes(peak.bytes)}"
    axes.set_title(title, loc="left", fontsize="medium", parse_math=False)  # names are no formulas
    axes.set_xlabel("call of an operator")
    if not sizes:
        return
    shown = _sample(profile.timeline.bytes_at)
    edges = [*shown, len(profile.calls)]
    edges[0] = 0
    below = [0] * len(edges)
    for category in _ORDER:
        if category in sizes:
            values = [sizes[category][number] for number in (*shown, shown[-1])]
            above = [low + high for low, high in zip(below, values, strict=True)]
            axes.fill_between(edges, below, above, step="post", color=_COLOURS[category], linewidth=0)
            below = above
    _mark_phases(axes, profile)
    axes.plot([peak.call + 0.5], [peak.bytes], "v", color="black", markersize=5)
    axes.margins(x=0)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.12 * peak.bytes))
    _count_in_bytes(axes.yaxis, axes.get_ylim()[1])


def _sample(sizes: Sequence[int]) -> list[int]:
    """The calls that are drawn: all, or of each few the one where most is in use, which keeps the peak."""
    width = -(-len(sizes) // _MOST_CALLS)
    starts = range(0, len(sizes), width)
    return [max(range(start, min(start + width, len(sizes))), key=sizes.__getitem__) for start in starts]


def _draw_modules(axes: Axes, profile: Profile) -> None:
    axes.set_title("saved for backward, by module", loc="left", fontsize="medium")
    bars = _sum_by_family(profile)
    for part in (Category.ACTIVATION, Category.LOSS_HEAD):
        values = [sizes.get(part, 0) for _, sizes in bars]
        before = [sizes.get(Category.ACTIVATION, 0) if part is Category.LOSS_HEAD else 0 for _, sizes in bars]
        axes.barh(range(len(bars)), values, left=before, color=_COLOURS[part])
    axes.set_yticks(range(len(bars)), [clip(spell_out(name), _LONGEST_NAME) for name, _ in bars], fontsize="small")
    _count_in_bytes(axes.xaxis, axes.get_xlim()[1])
    axes.tick_params(axis="x", labelrotation=30, labelsize="small")
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.invert_yaxis()


def _sum_by_family(profile: Profile) -> list[tuple[str, dict[Category, int]]]:
    """What modules keep, alike ones together, largest first; the smallest as one."""
    families = Families(profile.modules)
    sums: dict[str, dict[Category, int]] = {}
    for row in list_saved(profile):
        sizes = sums.setdefault(families.name(row.module) or "(model)", {})
        sizes[row.category] = sizes.get(row.category, 0) + row.bytes
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1].values()))
    if len(ordered) <= _MOST_BARS:
        return ordered
    rest: dict[Category, int] = {}
    for _, sizes in ordered[_MOST_BARS - 1 :]:
        for category, size in sizes.items():
            rest[category] = rest.get(category, 0) + size
    return [*ordered[: _MOST_BARS - 1], (f"{len(ordered) - _MOST_BARS + 1} others", rest)]


def _mark_phases(axes: Axes, profile: Profile) -> None:
    stretches = find_stretches(profile)
    for phase, first, last in stretches:
        if phase in _SHADES:
            axes.axvspan(first, last, color=_SHADES[phase], linewidth=0, zorder=0)
    # Recomputation comes and goes within backward: one name for both.
    named = [
        (Phase.BACKWARD if phase is Phase.RECOMPUTATION else phase, first, last) for phase, first, last in stretches
    ]
    for phase, group in itertools.groupby(named, key=lambda stretch: stretch[0]):
        parts = list(group)
        first, last = parts[0][1], parts[-1][2]
        if last - first > _NAMED * len(profile.calls):
            at = axes.get_xaxis_transform()  # calls across, and the height of the panel up
            middle = (first + last) / 2
            axes.text(middle, 0.99, _NAMES[phase], transform=at, ha="center", va="top", fontsize="small")


def _draw_legend(figure: Figure, sizes: Sequence[Mapping[Category, object]]) -> None:
    shown = [category for category in _ORDER if any(category in part for part in sizes)]
    marks: list[Patch] = [Patch(color=_COLOURS[category], label=category.value) for category in shown]
    if shown:
        figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize="small", frameon=False)


def _count_in_bytes(axis: Axis, most: float) -> None:
    """Put ticks at whole powers of 2, where bytes are round."""
    step = 2.0 ** max(0, math.floor(math.log2(max(most, 1) / _LEAST_TICKS)))
    axis.set_major_locator(MultipleLocator(step))
    axis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size)).replace(".00", "")))
