"""Frontiers of one model as a picture: step time against peak memory, one panel for each size and mode."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure as Picture

from recollect._bench.compare import OURS, Row, compare
from recollect._bench.results import Measured
from recollect._report.palette import FAINT, INK, PAPER, RULE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "#0b5cad"
_RIVALS = ("#d88015", "#75138b", "#3f7d20", "#a33b12", "#296e84", "#8d5b1d", "#5c6570", "#262f4c")
_MARKS = "os^Dv<>PX*"
_HOST = ", host"  # how plans of ours are called that may use host memory
_FAR = 1.5  # times the plain step: what costs more is named beside the points
_PANEL, _ALONE, _LINE = (5.5, 3.2), (7.5, 3.8), 0.22  # inches: a panel, one that is alone, a line of text


def draw_frontiers(title: str, cells: Mapping[tuple[str, str], Measured | None]) -> bytes:
    """The picture as SVG, the same for the same figures. What was measured has a panel; what is missing is named."""
    drawn = {key: rows for key, measured in cells.items() if (rows := _find_rows(measured))}
    missing = [f"{size}, {mode}" for size, mode in cells if (size, mode) not in drawn]
    looks = _choose_looks(row for rows in drawn.values() for row in rows)
    columns = max(1, min(2, len(drawn)))
    lines = max(1, -(-len(drawn) // columns))
    width, height = _ALONE if columns == 1 else _PANEL
    beside = 4 if columns > 1 else 3  # columns of the legend
    foot = _LINE * (1 + -(-(len(looks) + 2) // beside))
    head = _LINE * (2 if missing else 1) + 0.1
    with mpl.rc_context({"svg.hashsalt": "recollect", "font.size": 9}):
        picture = Picture(figsize=(width * columns, height * lines + head + foot), facecolor=PAPER)
        panels = picture.subplots(lines, columns, squeeze=False)
        for panel, ((size, mode), rows) in zip(panels.flat, drawn.items(), strict=False):
            _draw_panel(panel, f"{size}, {mode}", rows, looks)
        for panel in panels.flat[len(drawn) :]:
            panel.set_visible(False)
        total = picture.get_figheight()
        picture.text(0.01, 1 - 0.08 / total, title, ha="left", va="top", color=INK, fontsize=12)
        if missing:
            below = 1 - (0.1 + _LINE) / total
            picture.text(0.01, below, f"Not measured yet: {'; '.join(missing)}", ha="left", va="top", color=FAINT)
        labels: dict[str, Any] = {}
        for panel in panels.flat:
            for handle, text in zip(*panel.get_legend_handles_labels(), strict=True):
                labels.setdefault(text, handle)
        picture.legend(list(labels.values()), list(labels), loc="lower left", ncols=beside, frameon=False)
        picture.tight_layout(rect=(0, foot / total, 1, 1 - head / total))
        return _write(picture)


def draw_frontier(title: str, measured: Measured) -> bytes:
    """One panel alone, for a page that shows only one."""
    return draw_frontiers(title, {(measured.cell.size, measured.cell.mode): measured})


def _write(picture: Picture) -> bytes:
    drawn = io.BytesIO()
    picture.savefig(drawn, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in drawn.getvalue().decode().splitlines())
    return ("\n".join(lines) + "\n").encode()


def _find_rows(measured: Measured | None) -> list[Row]:
    return [] if measured is None else [row for row in compare(measured) if row.share is not None]


def _choose_looks(rows: Iterable[Row]) -> dict[str, tuple[str, str]]:
    """A mark and a colour for each contender, the same in all panels."""
    names = dict.fromkeys(row.figure.contender for row in rows if row.is_rival)
    return {name: (_MARKS[n % len(_MARKS)], _RIVALS[n % len(_RIVALS)]) for n, name in enumerate(names)}


def _draw_panel(panel: Axes, title: str, rows: list[Row], looks: Mapping[str, tuple[str, str]]) -> None:
    panel.set_title(title, loc="left", color=INK, fontsize=10)
    panel.tick_params(colors=FAINT)
    panel.grid(color=RULE, linewidth=0.8)
    panel.set_axisbelow(True)
    for side in panel.spines.values():
        side.set_visible(False)
    panel.set_xlabel("peak, of the plain step's activations", color=FAINT)
    panel.set_ylabel("step time over plain", color=FAINT)
    panel.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    panel.yaxis.set_major_formatter(lambda cost, _: f"{cost:+.0%}")
    mine = [row for row in rows if row.figure.family == OURS or row.figure.contender == "plain"]
    mine.sort(key=_share)
    near = [_cost(row) for row in rows if _cost(row) <= _FAR or row in mine]
    top = max(0.05, 1.1 * max(near))
    sends = [row for row in mine if row.figure.contender.endswith(_HOST)]
    stays = [row for row in mine if row not in sends]
    panel.plot(*_points(stays), "-o", color=_OURS, label=OURS, zorder=3)
    if sends:
        panel.plot(*_points(sends), "--o", color=_OURS, markerfacecolor=PAPER, label=f"{OURS}{_HOST} memory", zorder=3)
    far = []
    for row in (row for row in rows if row.is_rival):
        mark, colour = looks[row.figure.contender]
        if _cost(row) > top:
            far.append(f"{row.figure.contender}: {_cost(row):+.0%} at {_share(row):.0%}")
            continue
        panel.plot([_share(row)], [_cost(row)], mark, color=colour, label=row.figure.contender)
    if far:
        text = "\n".join(["off the scale ↑", *far])
        panel.text(0.99, 0.98, text, ha="right", va="top", color=FAINT, fontsize=8, transform=panel.transAxes)
    panel.set_ylim(top=top * 1.04)


def _points(rows: list[Row]) -> tuple[list[float], list[float]]:
    return [_share(row) for row in rows], [_cost(row) for row in rows]


def _share(row: Row) -> float:
    return row.share or 0.0


def _cost(row: Row) -> float:
    return row.cost or 0.0
