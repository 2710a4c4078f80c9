"""Frontiers of one model as a picture: step time against peak memory, one panel for each size and mode."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure as Picture

from recollect._bench.compare import OURS, Row, compare
from recollect._bench.results import Measured
from recollect._report.palette import FAINT, INK, PAPER, RULE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "#0b5cad"
_RIVALS = ("#d88015", "#75138b", "#3f7d20", "#a33b12", "#296e84", "#8d5b1d", "#5c6570", "#262f4c")
_MARKS = "os^Dv<>P"


def draw_frontiers(title: str, cells: Mapping[tuple[str, str], Measured | None]) -> bytes:
    """The picture as SVG, the same for the same figures."""
    with mpl.rc_context({"svg.hashsalt": "recollect", "font.size": 9}):
        picture = Picture(figsize=(11, 7.6), facecolor=PAPER)
        panels = picture.subplots(2, 2)
        for panel, ((size, mode), measured) in zip(panels.flat, cells.items(), strict=True):
            _draw_panel(panel, f"{size}, {mode}", measured)
        picture.suptitle(f"{title}: step time against peak memory", x=0.06, ha="left", color=INK, fontsize=13)
        picture.tight_layout(rect=(0, 0, 1, 0.98))
        drawn = io.BytesIO()
        picture.savefig(drawn, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in drawn.getvalue().decode().splitlines())
    return ("\n".join(lines) + "\n").encode()


def _draw_panel(panel: Axes, title: str, measured: Measured | None) -> None:
    panel.set_title(title, loc="left", color=INK, fontsize=10)
    panel.tick_params(colors=FAINT)
    panel.grid(color=RULE, linewidth=0.8)
    panel.set_axisbelow(True)
    for side in panel.spines.values():
        side.set_visible(False)
    rows = [] if measured is None else [row for row in compare(measured) if row.share is not None]
    if not rows:
        panel.text(0.5, 0.5, "not measured yet", ha="center", va="center", color=FAINT, transform=panel.transAxes)
        panel.set_xticks([])
        panel.set_yticks([])
        return
    panel.set_xlabel("peak, of the plain step's activations", color=FAINT)
    panel.set_ylabel("step time over plain", color=FAINT)
    panel.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    panel.yaxis.set_major_formatter(lambda cost, _: f"{cost:+.0%}")
    mine = [row for row in rows if row.figure.family == OURS or row.figure.contender == "plain"]
    mine.sort(key=_share)
    panel.plot([_share(row) for row in mine], [_cost(row) for row in mine], "-o", color=_OURS, label=OURS, zorder=3)
    for number, row in enumerate(row for row in rows if row.is_rival):
        panel.plot(
            [_share(row)],
            [_cost(row)],
            _MARKS[number % len(_MARKS)],
            color=_RIVALS[number % len(_RIVALS)],
            label=row.figure.contender,
        )
    panel.legend(fontsize=7, frameon=False)


def _share(row: Row) -> float:
    return row.share or 0.0


def _cost(row: Row) -> float:
    return row.cost or 0.0
