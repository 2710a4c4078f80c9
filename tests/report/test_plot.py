"""The report as a figure: what is drawn, without a display, whatever the names are."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import ModuleEntry, Profile
from recollect._report import palette
from recollect._report.plot import draw
from recollect._report.summary import list_saved
from tests.report.steps import transformer_step


def save(figure: Figure, form: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=form, dpi=50)
    return file.getvalue()


def labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def points(part: Collection) -> list[tuple[float, float]]:
    path: Any = part.get_paths()[0]
    return [(x, y) for x, y in path.vertices.tolist()]


def texts(figure: Figure) -> set[str]:
    """All texts of the figure as they were drawn."""
    with mpl.rc_context({"svg.fonttype": "none"}):  # texts as texts, not as outlines
        root = ET.fromstring(save(figure, "svg"))
    return {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}


def test_a_step_is_memory_over_its_calls_and_bars_by_module() -> None:
    step = transformer_step(4, tokens=512)
    memory, bars = draw(step).axes
    assert memory.get_title(loc="left") == "memory over the step"
    assert memory.get_xlim() == pytest.approx((0, len(step.calls)))
    assert memory.get_ylim()[1] > step.peak_bytes
    mark: Any = memory.lines[0]
    assert mark.get_xydata().tolist() == [[step.timeline.peak_call + 0.5, step.peak_bytes]]
    assert labels(bars)[:3] == ["(model)", "layers.*.mlp.up", "layers.*.mlp.act"]


def test_the_stack_is_as_high_as_the_step_at_each_call() -> None:
    step = transformer_step(2)
    memory, _ = draw(step).axes
    heights: dict[float, float] = {}
    for part in memory.collections:
        for x, y in points(part):
            heights[x] = max(heights.get(x, 0), y)
    for number, size in enumerate(step.timeline.bytes_at):
        assert heights[number] >= size
    assert max(heights.values()) == step.peak_bytes


def test_phases_are_marked_and_categories_named() -> None:
    figure = draw(transformer_step(4, recomputes=True))
    shown = texts(figure)
    assert {"forward", "backward", "optimizer"} <= shown
    assert {"parameters", "optimizer state", "activations", "loss head"} <= shown
    assert "buffers" not in shown
    assert len(figure.axes[0].patches) == 11  # forward, 4 times recomputation, 5 times backward, and the optimizer


def test_the_picture_has_a_title_and_the_numbers() -> None:
    step = dataclasses.replace(transformer_step(4, tokens=512), device="NVIDIA H200", capacity_bytes=2**26)
    shown = texts(draw(step))
    assert "GPT" in shown
    [numbers] = [text for text in shown if text.startswith("peak ")]
    parts = ["peak 17.32 MiB", "step 1.97 ms", "9.75 MiB saved for backward", "on NVIDIA H200"]
    assert numbers == " \N{MIDDLE DOT} ".join(parts)
    assert "It fits: the peak is 17.32 MiB of the 64.00 MiB of NVIDIA H200, 73% to spare." in shown


def test_the_capacity_is_a_line_unless_it_is_far_above() -> None:
    step = transformer_step(4, tokens=512)
    near = draw(dataclasses.replace(step, capacity_bytes=2**24)).axes[0]
    lines: Any = near.lines
    assert any(set(line.get_ydata()) == {2**24} for line in lines)
    assert near.get_ylim()[1] > step.peak_bytes
    far: Any = draw(dataclasses.replace(step, capacity_bytes=2**33)).axes[0]
    assert not any(set(line.get_ydata()) == {2**33} for line in far.lines)


def test_the_step_before_is_a_curve_over_the_step_after() -> None:
    before, after = transformer_step(4, tokens=512), transformer_step(4, tokens=512, recomputes=True)
    figure = draw(after, against=before)
    memory, bars = figure.axes
    curve: Any = memory.lines[1]
    assert max(curve.get_ydata()) == before.peak_bytes
    assert curve.get_xdata()[-1] == len(after.calls)
    assert memory.get_ylim()[1] > before.peak_bytes
    assert {"before", "activations"} <= texts(figure)
    kept = {row.module for row in list_saved(before)}
    assert {"layers.*.mlp.up", "layers.*.mlp.act"} <= set(labels(bars))
    assert "layers.0.mlp.up" in kept
    change = (after.peak_bytes - before.peak_bytes) / before.peak_bytes
    assert any(f"(\N{MINUS SIGN}{-change:.0%})" in text for text in texts(figure))


def test_the_picture_has_the_colours_of_the_page() -> None:
    style = (Path(palette.__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
    light = style[: style.index("@media")]
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    assert [found[f"c{at}"] for at in range(len(palette.STACK))] == list(palette.COLOURS.values())
    assert [found[f"p{at}"] for at in range(len(Phase))] == list(palette.PHASES.values())
    names = ("paper", "ink", "soft", "faint", "rule", "less", "more")
    assert [found[name] for name in names] == [getattr(palette, name.upper()) for name in names]
    memory: Any = draw(transformer_step(2)).axes[0]
    drawn = {to_hex(part.get_facecolor()[0]) for part in memory.collections}
    assert drawn <= set(palette.COLOURS.values())


def test_many_modules_are_summed_up() -> None:
    step = transformer_step(20)
    entries = [ModuleEntry(path=f"layers.{number}", kind=f"Block{number}") for number in range(20)]
    names = labels(draw(dataclasses.replace(step, modules=tuple(entries))).axes[1])
    assert len(names) == 12
    assert names[-1].endswith(" others")


def test_the_peak_is_drawn_however_long_the_step() -> None:
    step = transformer_step(300)
    assert len(step.calls) > 5000
    memory, _ = draw(step).axes
    drawn = [points(part) for part in memory.collections]
    assert max(y for part in drawn for _, y in part) == step.peak_bytes
    assert all(len(part) < 10_000 for part in drawn)


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_every_form_is_a_file_of_its_kind(form: str, start: bytes) -> None:
    drawn = save(draw(transformer_step(2)), form)
    assert drawn.startswith(start)
    assert len(drawn) > 4000
    if form == "svg":
        assert ET.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("name", ["$x^{$", "a_{b", "<script>", "&amp;", "_hidden", "\\frac", "\x1b[31m", "x" * 300])
def test_names_are_shown_as_they_are(name: str) -> None:
    call = OpCall(op="op", module=name, outputs=(Value(storage=0),))
    step = Profile(
        storages=(Storage(bytes=16, category=Category.ACTIVATION),),
        calls=(call,),
        saved=(Saved(storage=0, by=0),),
        name=name,
    )
    shown = texts(draw(step))
    safe = name.replace("\x1b", "\\x1b")
    assert (safe if len(safe) < 100 else f"{'x' * 47}\N{HORIZONTAL ELLIPSIS}") in shown
    assert (safe if len(safe) < 100 else f"...{'x' * 29}") in shown


@pytest.mark.parametrize(
    "step",
    [
        Profile(storages=(), calls=()),
        Profile(storages=(Storage(bytes=8, lifetime=Lifetime.STEP),), calls=()),
        Profile(storages=(), calls=(OpCall(op="op"),)),
        Profile(storages=(Storage(bytes=8, lifetime=Lifetime.STEP),), calls=(OpCall(op="op"),)),
        dataclasses.replace(transformer_step(2), saved=(), modules=()),
    ],
    ids=["nothing", "no calls", "no memory", "one call", "nothing saved"],
)
def test_a_profile_may_lack_parts(step: Profile) -> None:
    assert save(draw(step), "png")
    for figure in (draw(step, against=transformer_step(2)), draw(transformer_step(2), against=step)):
        figure.draw_without_rendering()  # lays everything out, as all forms do


def test_no_display_and_no_global_state_are_needed(tmp_path: Path) -> None:
    program = """
import sys
from recollect._report import palette
from recollect._report.plot import draw
from recollect._report.summary import list_saved
from tests.report.steps import transformer_step
draw(transformer_step(2)).savefig(sys.argv[1])
print("matplotlib.pyplot" in sys.modules)
"""
    hidden = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    file = tmp_path / "figure.png"
    command = [sys.executable, "-c", program, str(file)]
    environment = hidden | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
    assert file.stat().st_size > 5000
