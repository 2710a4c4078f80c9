"""The page of a profile is one file that needs nothing else, shows the truth, and lets no name of a model do harm."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.decisions import Decision
from recollect._core.gains import Gain
from recollect._core.profiles import AllocatorEntry, Clock, ModuleEntry, Profile, RuleEntry
from recollect._core.units import format_bytes
from recollect._report.answer import answer
from recollect._report.html import write_html
from recollect._report.palette import STACK
from recollect._report.summary import find_peak, list_modules, list_saved
from recollect._report.verdict import judge_allocator, judge_peak
from tests.report.browser import LAPTOP, PHONE, Page
from tests.report.steps import transformer_step

STEP = transformer_step(2)
RECOMPUTED = transformer_step(2, recomputes=True)
EMPTY = Profile(storages=(), calls=())
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "\"'><img src=x onerror=alert(3)>",
    "javascript:alert(4)",
    "{{script}}",
    "\u2028\u2029\u202e\N{PILE OF POO}",
    "constructor",
    "__proto__",
    "",
)
MLP = Gain(path="layers.0.mlp", kind="MLP", freed_bytes=2**19, peak_bytes=2**22, recompute_s=1e-3, recompute_flops=3)
GAINS = (
    replace(MLP, path="layers.*", kind="Block", count=2, freed_bytes=2**20, peak_bytes=2**21, recompute_s=3e-3),
    MLP,
)


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def hostile_step(name: str) -> Profile:
    """A step in which everything that a user can name has one name."""
    made = Value(storage=1, shape=(4,), dtype=name, bytes=16)
    calls = (
        OpCall(op=name, inputs=(Value(storage=0),), outputs=(made,), module=name, source=name, region=name),
        OpCall(op=name, phase=Phase.BACKWARD, inputs=(made,), module=name, source=name, forward=0),
    )
    return Profile(
        storages=(
            Storage(bytes=32, lifetime=Lifetime.STEP, name=name, category=Category.PARAMETER),
            Storage(bytes=16, category=Category.ACTIVATION),
        ),
        calls=calls,
        saved=(Saved(storage=1, by=0, reader=1),),
        device=name,
        name=name,
        optimizer=name,
        torch=name,
        modules=(ModuleEntry(path="", kind=name), ModuleEntry(path=name, kind=name)),
        rules=(RuleEntry(region=name, rule=name, decision=Decision.SAVE, values=1, bytes=16),),
        allocators=(AllocatorEntry(device=name, peak_bytes=1, reserved_bytes=2, total_bytes=3),),
        notes=(name,),
    )


def chart_place(page: Page, call: int, *, chart: int = 0) -> tuple[float, float]:
    """Where in the window a call is on a chart that shows the whole step."""
    code = """
        const chart = document.querySelectorAll('.chart')[arguments[0]];
        chart.scrollIntoView({block: 'center', behavior: 'instant'});
        const box = chart.querySelector('svg').getBoundingClientRect();
        const last = Math.max(...[...document.querySelectorAll('.chart')].map((one) => one.ariaValueMax));
        const inner = box.width - 68;
        return [box.left + 58 + inner * (arguments[1] + 0.5) / (last + 1), box.top + box.height / 2];
    """
    x, y = page.script(code, chart, call)
    return x, y


# ------------------------------------------------------------------------------------------ what needs no browser


def test_a_page_without_its_data_is_small() -> None:
    assert len(write_html(EMPTY).encode()) < 120_000


def test_a_page_refers_to_no_other_file() -> None:
    class Links(HTMLParser):
        found: list[tuple[str, str | None]]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [(name, value) for name, value in attrs if name in ("src", "href", "srcset", "action")]

    links = Links()
    links.found = []
    text = write_html(STEP, against=RECOMPUTED)
    links.feed(text)
    assert links.found == [("href", "data:,")]
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


def test_a_page_lets_a_browser_run_and_load_nothing_but_what_is_in_it() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', write_html(STEP))
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy[1]
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["script-src"])


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_a_model_becomes_markup(name: str) -> None:
    text, plain = write_html(hostile_step(name)), write_html(hostile_step("name"))
    assert len(re.findall(r"</?script|<!--|<img", text)) == len(re.findall(r"</?script|<!--|<img", plain))
    assert data_of(text)["steps"][0]["name"] == name


def test_a_name_that_is_no_proper_unicode_can_be_written() -> None:
    assert write_html(hostile_step("\ud83d")).encode()


def test_the_data_has_each_text_once_and_is_compact() -> None:
    step = transformer_step(32)
    text = write_html(step)
    strings = data_of(text)["strings"]
    assert len(strings) == len(set(strings))
    per_call = (len(text) - len(write_html(EMPTY))) / len(step.calls)
    assert per_call < 200


# ------------------------------------------------------------------------------------------------ the head


def test_the_head_says_the_peak_where_it_is_and_how_long_the_step_takes(page: Page) -> None:
    page.open(STEP)
    peak, facts = find_peak(STEP), page.text("#facts")
    assert format_bytes(peak.bytes) in facts
    assert peak.sentence in facts
    assert "measured on the host" in facts
    assert page.text("h1") == "GPT"
    assert page.text("#subject") == "on cpu, with AdamW"
    assert "GPT" in page.driver.title


def test_a_dry_profile_is_called_estimated(page: Page) -> None:
    page.open(replace(STEP, is_dry=True, clock=Clock.ROOFLINE, device="NVIDIA H200", notes=("a note & another",)))
    assert "estimated" in page.text("#facts")
    assert "estimated from operations and bytes moved" in page.text("#facts")
    assert page.text("#subject") == "on NVIDIA H200, with AdamW, estimated: nothing was run"
    assert page.text("#notes") == "a note & another"


def test_without_times_no_time_is_shown(page: Page) -> None:
    page.open(transformer_step(1, has_times=False))
    assert page.column("#facts dt") == ["Peak", "Saved for backward"]
    assert page.all("[data-axis]") == []


def test_the_page_says_what_the_peak_is_made_of_and_what_the_allocator_holds(page: Page) -> None:
    entry = AllocatorEntry(device="cuda:0", peak_bytes=2**30, reserved_bytes=2**31, total_bytes=2**34)
    page.open(replace(STEP, allocators=(entry,)))
    assert page.text("#verdict").split("\n") == [*judge_peak(find_peak(STEP)), judge_allocator(entry)]


def test_the_head_answers_whether_it_fits_and_what_would_help(page: Page) -> None:
    page.open(replace(STEP, device="NVIDIA H200", capacity_bytes=2**22), gains=GAINS)
    assert page.text("#fit") == (
        "It does not fit: the peak is 5.03 MiB, 1.03 MiB more than the 4.00 MiB of NVIDIA H200."
    )
    found = answer(replace(STEP, capacity_bytes=2**22), GAINS)
    assert page.column("#suggestions code") == [one.code for one in found.suggestions]
    assert page.column("#suggestions .gives") == [one.gives for one in found.suggestions]
    page.open(replace(STEP, capacity_bytes=2**30))
    assert page.text("#fit").startswith("It fits: ")


@pytest.mark.parametrize("against", [None, STEP])
def test_the_answer_and_the_timeline_are_above_the_fold(page: Page, against: Profile | None) -> None:
    step = replace(RECOMPUTED, device="NVIDIA H200", capacity_bytes=2**22)
    page.open(step, against=against, gains=GAINS)
    code = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    height = LAPTOP[1]
    assert page.script(code, "#suggestions") < height
    assert page.script(code, "#comparison-curves svg" if against is not None else ".chart svg") <= height


def test_a_line_of_code_is_copied_or_selected_with_one_click(page: Page) -> None:
    page.open(STEP, gains=GAINS)
    button = page.all("#suggestions button")[0]
    button.click()
    page.driver.execute_async_script("setTimeout(arguments[0], 300)")
    assert button.text in ("Copied", "Selected")


def test_saved_tensors_of_several_passes_are_explained(page: Page) -> None:
    calls: list[OpCall] = []
    saved, storages = [], [Storage(bytes=8, lifetime=Lifetime.STEP)]
    for _ in range(3):
        at, number = len(storages), len(calls)
        storages.append(Storage(bytes=2**20, category=Category.ACTIVATION))
        made = Value(storage=at)
        calls += [
            OpCall(op="aten.exp.default", inputs=(Value(storage=0),), outputs=(made,)),
            OpCall(op="aten.mul.Tensor", phase=Phase.BACKWARD, inputs=(made,), forward=number),
        ]
        saved.append(Saved(storage=at, by=number, reader=number + 1))
    page.open(Profile(storages=tuple(storages), calls=tuple(calls), saved=tuple(saved)))
    assert "at a time; 3.00 MiB in 3 tensors over 3 forward passes, each of which frees its own" in page.text("#facts")


def test_the_picture_is_a_png_with_the_colours_of_the_page(page: Page) -> None:
    for scheme, is_bright in (("light", True), ("dark", False)):
        page.open(RECOMPUTED, against=STEP, scheme=scheme)
        code = """
            const done = arguments[0];
            HTMLAnchorElement.prototype.click = function () {
                const image = new Image();
                image.onload = () => {
                    const canvas = document.createElement('canvas');
                    [canvas.width, canvas.height] = [image.width, image.height];
                    const brush = canvas.getContext('2d');
                    brush.drawImage(image, 0, 0);
                    done([this.download, this.href.slice(0, 22), image.width, image.height,
                        [...brush.getImageData(2, 2, 1, 1).data]]);
                };
                image.src = this.href;
            };
            document.querySelector('#share button').click();
        """
        name, start, width, height, corner = page.driver.execute_async_script(code)
        assert (name, start, width, height) == ("recollect.png", "data:image/png;base64,", 2400, 1260)
        assert (sum(corner[:3]) > 700) == is_bright
    page.requests()  # what the picture was made of: data of this page


# -------------------------------------------------------------------------------------------- the timeline


@pytest.mark.parametrize("capacity", [2**22, 2**23])
def test_the_capacity_is_a_line_across_the_timeline(page: Page, capacity: int) -> None:
    page.open(replace(STEP, capacity_bytes=capacity))
    assert page.column(".chart .mark.capacity") == [f"capacity {format_bytes(capacity)}"]
    assert len(page.all(".chart .capacity-line")) == 1


def test_a_capacity_far_above_the_peak_is_a_word(page: Page) -> None:
    page.open(replace(STEP, capacity_bytes=2**30))
    assert page.column(".chart .mark.capacity") == ["capacity 1.00 GiB, above this scale"]
    assert page.all(".chart .capacity-line") == []


def test_the_page_counts_bytes_as_the_library_does(page: Page) -> None:
    step = replace(
        STEP,
        rounding_bytes=512,
        fixed_bytes=3000,
        calls=(*STEP.calls[:3], replace(STEP.calls[3], workspace_bytes=1_000_000), *STEP.calls[4:]),
    )
    page.open(step)
    page.press(".chart", "\ue011")  # Home
    for call in range(5):
        assert page.text(".panel .figure") == format_bytes(step.timeline.bytes_at[call])
        assert page.one(".chart").get_attribute("aria-valuenow") == str(call)
        page.press(".chart", "\ue014")  # to the right
    at_three = step.timeline.bytes_by_category(3)
    page.press(".chart", "\ue012", "\ue012")  # to the left
    shown = dict(zip(page.column(".legend .label"), page.column(".legend .size"), strict=True))
    assert {name: text for name, text in shown.items() if text != "0 B"} == {
        category.value: format_bytes(size) for category, size in at_three.items()
    }
    assert "workspace of this call" in " ".join(page.column(".alive td"))


def test_the_panel_shows_the_peak_until_something_is_pointed_at(page: Page) -> None:
    page.open(STEP)
    peak = find_peak(STEP)
    assert page.text(".panel h3") == "At the peak"
    assert page.text(".panel .figure") == format_bytes(peak.bytes)
    assert "".join(page.column(".peak-label")) == f"peak {format_bytes(peak.bytes)}"
    alive = sum(STEP.timeline.sizes[index] for index in STEP.timeline.alive_at(peak.call))
    sizes = page.column(".alive td.number")
    assert sizes[0] == format_bytes(max(STEP.timeline.sizes[index] for index in STEP.timeline.alive_at(peak.call)))
    assert len(sizes) == 10
    assert alive == peak.bytes - STEP.calls[peak.call].workspace_bytes


def test_hovering_shows_the_call_and_the_tensors_that_are_alive(page: Page) -> None:
    page.open(STEP)
    number = next(at for at, call in enumerate(STEP.calls) if call.module == "layers.1.mlp.act")
    page.mouse("mouseMoved", *chart_place(page, number))
    panel, alive = page.text(".panel .where"), page.column(".alive tr td:nth-child(3)")
    assert page.text(".panel h3") == f"At call {number}"
    assert "forward of layers.1.mlp.act" in panel
    assert "aten.gelu.default, model.py:31" in panel
    assert format_bytes(STEP.timeline.bytes_at[number]) in panel
    assert "layers.*.mlp.up \u00d7 2" in alive  # identical layers are one row
    assert "layers.*.mlp.act \u00d7 2" in alive
    assert "float32[128, 256]" in page.column(".alive tr td:nth-child(2)")
    x, _ = chart_place(page, number)
    page.mouse("mouseMoved", x, 2)
    assert page.text(".panel h3") == "At the peak"


def test_a_finger_on_the_chart_shows_the_call_beneath_it(page: Page) -> None:
    page.open(STEP, size=PHONE)
    number = len(STEP.calls) - 3
    page.touch("touchStart", chart_place(page, number))
    page.touch("touchEnd")
    assert "optimizer" in page.text(".panel .where")


def test_keys_move_over_calls_and_say_where_they_are(page: Page) -> None:
    page.open(STEP)
    page.press(".chart", "\ue010")  # End
    last = len(STEP.calls) - 1
    chart = page.one(".chart")
    assert chart.get_attribute("role") == "slider"
    assert chart.get_attribute("aria-valuenow") == str(last)
    assert chart.get_attribute("aria-valuetext").startswith(f"call {last}, optimizer, aten._fused_adamw_.default")
    page.press(".chart", "p")
    assert page.text(".panel h3") == "At the peak"


def test_dragging_over_the_chart_zooms_and_a_button_shows_the_whole_again(page: Page) -> None:
    page.open(STEP)
    (left, y), (right, _) = chart_place(page, 10), chart_place(page, 25)
    page.mouse("mousePressed", left, y, button="left", clickCount=1)
    page.mouse("mouseMoved", right, y, button="left", buttons=1)
    page.mouse("mouseReleased", right, y, button="left", clickCount=1)
    ticks = [text for text in page.column(".tick") if text.startswith("call ")]
    assert ticks[0] == "call 12"
    assert ticks[-1] == "call 24"
    page.click(".tools button", text="Whole step")
    assert "call 0" in page.column(".tick")


def test_the_strip_below_chooses_what_the_chart_shows(page: Page) -> None:
    page.open(STEP, size=PHONE)
    code = """
        const strip = document.querySelector('.overview');
        strip.scrollIntoView({block: 'center', behavior: 'instant'});
        const box = strip.getBoundingClientRect();
        return [box.left, box.top, box.width];
    """
    left, top, width = page.script(code)
    page.touch("touchStart", (left + width / 2, top + 20))
    page.touch("touchMove", (left + width - 15, top + 20))
    page.touch("touchEnd")
    assert "call 0" not in page.column(".tick")


def test_the_axis_can_be_time(page: Page) -> None:
    page.open(STEP)
    page.click("[data-axis=time]")
    assert page.one("[data-axis=time]").get_attribute("aria-pressed") == "true"
    assert any(re.fullmatch(r"[\d.]+ (s|ms|\u00b5s)", text) for text in page.column(".tick"))


def test_a_category_can_be_left_out_of_the_chart(page: Page) -> None:
    page.open(STEP)
    parameters = f".chart path.c{STACK.index(Category.PARAMETER)}"
    assert len(page.all(parameters)) == 1
    page.click(".legend li:last-child button")
    assert page.all(parameters) == []
    assert page.one(".legend li:last-child button").get_attribute("aria-pressed") == "false"
    assert "parameters" not in page.column(".alive td")


def test_phases_are_marked(page: Page) -> None:
    page.open(RECOMPUTED)
    assert {"forward", "backward", "optimizer"} <= set(page.column(".phase-name"))
    assert page.all(".phase.p2")


def test_no_peak_is_lost_among_thousands_of_calls(page: Page) -> None:
    small = Value(storage=0, shape=(1,), dtype="float32", bytes=4)
    calls = [OpCall(op="aten.add.Tensor", outputs=(replace(small, storage=at),)) for at in range(9000)]
    calls[4321] = replace(calls[4321], workspace_bytes=2**30, module="the.one")
    page.open(Profile(storages=(Storage(bytes=4),) * 9000, calls=tuple(calls), name="Long"))
    page.mouse("mouseMoved", *chart_place(page, 4321))
    assert page.text(".panel h3") == "At the peak"
    assert "the.one" in page.text(".panel")


# ------------------------------------------------------------------------------------------ tree map, tables


def test_the_tree_map_shows_modules_by_what_they_keep(page: Page) -> None:
    page.open(STEP)
    rows = {row.path: row for row in list_modules(STEP)}
    page.unfold()
    titles = [tile.get_attribute("title") for tile in page.all(".tile")]
    assert f"layers: {format_bytes(rows['layers'].saved_bytes)}" in titles
    assert f"layers.1.mlp: {format_bytes(rows['layers.1.mlp'].saved_bytes)}" in titles
    code = "const box = arguments[0].getBoundingClientRect(); return box.width * box.height"
    areas = [page.script(code, page.one(f"[title^='layers.{layer}:']")) for layer in (0, 1)]
    assert areas[0] == pytest.approx(areas[1], rel=0.01)


def test_no_tile_is_drawn_outside_of_the_one_that_holds_it(page: Page) -> None:
    step = transformer_step(16, vocabulary=50, width=32)
    slivers = {row.storage for row in list_saved(step) if row.op == "aten.add.Tensor"}
    sizes = [storage.bytes // (30 if at in slivers else 1) for at, storage in enumerate(step.storages)]
    storages = tuple(replace(storage, bytes=size) for storage, size in zip(step.storages, sizes, strict=True))
    page.open(replace(step, storages=storages))
    page.unfold()
    code = """
        const map = document.querySelector('.tiles').getBoundingClientRect();
        const tiles = [...document.querySelectorAll('.tile')].map((tile) => [tile.title, tile.getBoundingClientRect()]);
        const holds = (outer, inner) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
            && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
        const layers = tiles.filter(([title]) => /^layers[.][0-9]+:/.test(title));
        const parts = tiles.filter(([title]) => /layers[.][0-9]+/.test(title));
        const layerOf = (title) => layers.find(([name]) => name.startsWith(/layers[.][0-9]+/.exec(title)[0] + ':'));
        return [layers.length, parts.length, tiles.every(([, box]) => holds(map, box)),
            parts.filter(([title, box]) => !holds(layerOf(title)[1], box)).map(([title]) => title)];
    """
    layers, parts, fit, outside = page.script(code)
    assert (layers, fit, outside) == (16, True, [])
    assert parts > 64


def test_a_click_goes_into_a_module_and_the_breadcrumb_out_again(page: Page) -> None:
    page.open(STEP)
    page.unfold()
    page.click_corner("[title^='layers.1:']")
    assert page.column(".crumbs li") == ["GPT", "layers", "1"]
    page.mouse("mouseMoved", 2, 2)
    assert "layers.1 (Block)" in page.text(".tile-info")
    assert page.all("[title^='layers.0']") == []
    page.click("[title^='layers.1.mlp.act:']")
    assert page.column(".crumbs li") == ["GPT", "layers", "1", "mlp", "act"]
    assert "float32[128, 256] in layers.1.mlp.act" in page.one(".tile").get_attribute("title")
    page.click(".crumbs button", text="GPT")
    assert page.column(".crumbs li") == ["GPT"]
    assert page.all("[title^='layers.0:']")


def test_keys_go_into_a_module_and_stay_at_the_map(page: Page) -> None:
    page.open(STEP)
    page.unfold()
    assert page.all(".tile[tabindex='0']")[0].get_attribute("title").startswith("layers:")
    page.press("[title^='layers:']", "\ue007")  # Enter
    assert page.column(".crumbs li") == ["GPT", "layers"]
    assert page.driver.switch_to.active_element.text == "layers"


def test_hovering_a_tile_says_what_it_is(page: Page) -> None:
    page.open(STEP)
    page.unfold()
    tile = page.one("[title^='layers.0.mlp.up:']")
    box = page.script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'});"
        "const box = arguments[0].getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]",
        tile,
    )
    page.mouse("mouseMoved", *box)
    assert page.text(".tile-info").startswith("layers.0.mlp.up (Linear): 128.00 KiB")


def test_the_tree_map_lists_the_tensors_of_a_module_in_the_table(page: Page) -> None:
    page.open(STEP)
    page.unfold()
    page.click_corner("[title^='layers.1:']")
    page.click("#modules .quiet")
    assert {text.startswith("layers.1") for text in page.column("#saved td.module")} == {True}


def test_the_table_lists_what_is_saved_largest_first(page: Page) -> None:
    page.open(STEP)
    page.unfold()
    rows = list_saved(STEP)
    assert page.column("#saved td.size") == [format_bytes(row.bytes) for row in rows]
    assert page.column("#saved tbody tr:first-child td")[:5] == [
        "512.00 KiB",
        "float32[128, 1024]",
        "GPT",
        "aten._log_softmax.default",
        "model.py:66",
    ]


def test_headers_sort_up_and_down(page: Page) -> None:
    page.open(transformer_step(11))
    page.unfold()
    page.press("#saved input", "model.py:38")
    page.click("#saved th button", text="Module")
    modules = page.column("#saved td.module")
    assert page.one("#saved th.module").get_attribute("aria-sort") == "ascending"
    assert modules.index("layers.2.norm") < modules.index("layers.10.norm")  # numbers by their size
    page.click("#saved th button", text="Module")
    assert page.one("#saved th.module").get_attribute("aria-sort") == "descending"
    assert page.all("#saved th[aria-sort]") == [page.one("#saved th.module")]
    page.click("#saved th button", text="Size")
    assert page.column("#saved td.size")[0] == "32.00 KiB"
    assert page.one("#saved th.size").get_attribute("aria-sort") == "descending"


def test_the_filter_looks_in_module_operator_and_line(page: Page) -> None:
    page.open(STEP)
    page.unfold()
    count = len(list_saved(STEP))
    for words, wanted in (("layers.1", "layers.1"), ("GELU", "aten.gelu.default"), ("model.py:24", "model.py:24")):
        page.one("#saved input").clear()
        page.press("#saved input", words)
        rows = page.column("#saved tbody tr")
        assert 0 < len(rows) < count
        assert all(wanted in row for row in rows)
    page.one("#saved input").clear()
    page.press("#saved input", "qkv aten.mm layers.0")
    assert page.column("#saved td.module") == ["layers.0.attn.qkv"]
    assert page.text("#saved .status").startswith(f"1 of {count} tensors, 96.00 KiB of ")
    page.press("#saved input", " nonsense")
    assert page.column("#saved tbody tr") == ["Nothing matches."]


def test_identical_layers_are_folded_until_they_are_wanted_one_by_one(page: Page) -> None:
    step = transformer_step(12)
    page.open(step)
    rows = page.column("#saved td.module")
    assert "layers.*.mlp.act \u00d7 12" in rows
    assert not any("layers.3" in row for row in rows)
    assert page.text("#saved .status").startswith(f"{len(list_saved(step))} of {len(list_saved(step))} tensors")
    titles = [tile.get_attribute("title") for tile in page.all(".tile")]
    saved = {row.path: row.saved_bytes for row in list_modules(step)}
    whole = sum(saved[f"layers.{number}.mlp"] for number in range(12))
    assert f"layers.*.mlp: {format_bytes(whole)}" in titles
    page.press("#saved input", "layers.3.mlp")  # finds the row that it is in
    assert "layers.*.mlp.act \u00d7 12" in page.column("#saved td.module")
    page.unfold()
    assert "layers.3.mlp.act" in page.column("#saved td.module")


def test_a_model_without_identical_layers_has_nothing_to_fold(page: Page) -> None:
    page.open(hostile_step("name"))
    assert not page.one("#fold").is_displayed()


def test_a_category_can_be_chosen(page: Page) -> None:
    page.open(STEP)
    page.click("#saved option[value='loss head']")
    assert set(page.column("#saved td.category")) == {"loss head"}


def test_long_tables_show_more_when_asked(page: Page) -> None:
    step = transformer_step(16)
    page.open(step)
    page.unfold()
    assert len(page.all("#saved tbody tr")) == 50
    page.click("#saved .more button")
    assert len(page.column("#saved tbody tr")) == len(list_saved(step))
    assert not page.one("#saved .more").is_displayed()


def test_gains_are_sorted_by_what_they_give(page: Page) -> None:
    page.open(STEP, gains=GAINS)
    assert page.column("#gains tbody td") == [
        *("layers.*", "2 \u00d7 Block", "2.00 MiB", "\u22123.03 MiB", "1.00 MiB", "3.00 ms", "3.07 s"),
        *("layers.0.mlp", "MLP", "4.00 MiB", "\u22121.03 MiB", "512.00 KiB", "1.00 ms", "2.05 s"),
    ]


def test_gains_of_one_of_many_identical_layers_are_left_out_and_policies_named(page: Page) -> None:
    more = (
        replace(GAINS[0], policy="selective", peak_bytes=3 * 2**20),
        replace(GAINS[0], every=2, count=1, peak_bytes=2**22),
        replace(GAINS[0], path="layers.0", count=1),
    )
    page.open(STEP, gains=(*GAINS, *more))
    assert page.column("#gains td.module") == ["layers.*", "layers.*, selective", "layers.0.mlp", "layers.*, every 2nd"]


def test_gains_without_times_cost_operations(page: Page) -> None:
    page.open(STEP, gains=tuple(replace(gain, recompute_s=None, recompute_flops=10**10) for gain in GAINS))
    assert page.column("#gains td:nth-child(6)") == ["10.0 GFLOP", "10.0 GFLOP"]


def test_what_the_policy_decided_is_listed(page: Page) -> None:
    rule = RuleEntry(region="layers.0", regions=2, rule="save mm", decision=Decision.SAVE, values=8, bytes=2**20)
    page.open(replace(RECOMPUTED, rules=(rule,)))
    assert page.column("#rules tbody td") == ["layers.0 and 1 more", "save mm", "save", "8", "1.00 MiB"]


def test_sections_without_content_are_not_there(page: Page) -> None:
    page.open(STEP)
    assert page.column("#sections a") == ["Timeline", "Why", "Modules", "Tensors"]
    assert not any(page.one(section).is_displayed() for section in ("#gains", "#rules", "#comparison"))


# -------------------------------------------------------------------------------------------- comparison


def test_two_profiles_are_compared_on_one_scale(page: Page) -> None:
    page.open(RECOMPUTED, against=STEP)
    ticks = [[tick.text for tick in chart.find_elements("css selector", ".tick")] for chart in page.all(".chart")]
    assert ticks[0] == ticks[1]
    assert page.column(".chart .mark:not(.peak-label)") == [
        f"peak after {format_bytes(RECOMPUTED.peak_bytes)}",
        f"peak before {format_bytes(STEP.peak_bytes)}",
    ]
    page.mouse("mouseMoved", *chart_place(page, 5, chart=0))
    assert page.text(".panel h3") == "Before, at call 5"


def test_before_and_after_are_two_curves_on_one_scale(page: Page) -> None:
    page.open(replace(RECOMPUTED, capacity_bytes=2**22), against=STEP)
    assert page.column(".curves .mark") == [
        f"before {format_bytes(STEP.peak_bytes)}",
        f"after {format_bytes(RECOMPUTED.peak_bytes)}",
        "capacity 4.00 MiB",
    ]
    assert len(page.all(".curves path.curve")) == 2
    assert len(page.all(".curves .capacity-line")) == 1


def test_a_comparison_says_what_changed_by_category_and_by_module(page: Page) -> None:
    page.open(RECOMPUTED, against=STEP)
    less = STEP.peak_bytes - RECOMPUTED.peak_bytes
    assert f"The peak is {format_bytes(less)} less than before" in page.text("#comparison-lead")
    first = page.column("#comparison-categories tbody tr:first-child td")
    before, after = (find_peak(step).by_category[Category.ACTIVATION] for step in (STEP, RECOMPUTED))
    assert first == ["activations", *map(format_bytes, (before, after)), f"\u2212{format_bytes(before - after)}"]
    modules = page.column("#comparison-modules tbody tr td:first-child")
    assert "layers.*.mlp.act" in modules
    assert "embed" not in modules
    assert "compared with before" in page.text("#facts")


def test_a_comparison_warns_where_times_are_not_of_one_kind(page: Page) -> None:
    page.open(STEP, against=replace(STEP, clock=Clock.ROOFLINE))
    warning = "Times before are estimated from operations and bytes moved, after measured on the host."
    assert page.text("#comparison-lead").endswith(warning)


def test_equal_profiles_have_no_difference(page: Page) -> None:
    page.open(STEP, against=STEP)
    assert page.column("#comparison-modules tbody tr") == ["No difference."]
    assert "the same as before" in page.text("#comparison-lead")


# --------------------------------------------------------------------------- names, sizes, colours, emptiness


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_a_model_are_shown_as_they_are_and_do_nothing(page: Page, name: str) -> None:
    step = hostile_step(name)
    page.open(step, against=step, gains=(replace(GAINS[0], path=name, kind=name),))
    assert page.script("return document.querySelector('h1').textContent") == (name or "A training step")
    page.press(".chart", "\ue011")
    page.click(".tile:last-child")
    assert page.column("#saved td.module") == [name]
    assert page.column("#gains td.module") == [name]
    assert page.script("return document.querySelectorAll('script, img').length") == 2
    assert page.script("return document.querySelectorAll('a:not([href^=\"#\"])').length") == 0


def test_the_test_for_harm_can_fail(browser: Page) -> None:
    file = browser.folder / "broken.html"
    text = write_html(STEP).replace("showSections();\n", "showSections();\nthrow new Error('harm');\n")
    file.write_text(text, encoding="utf-8")
    browser.show(file.as_uri())
    assert any("Content Security Policy" in error for error in browser.errors())


def test_the_test_for_requests_can_fail(browser: Page) -> None:
    file = browser.folder / "curious.html"
    file.write_text('<!doctype html><img src="http://127.0.0.1:9/pixel.png">', encoding="utf-8")
    browser.show(file.as_uri())
    assert "http://127.0.0.1:9/pixel.png" in browser.requests()


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_profile_without_calls_has_a_page(page: Page, size: tuple[int, int]) -> None:
    page.open(EMPTY, against=EMPTY, size=size)
    assert page.text("#timeline-lead") == "The profile has no calls."
    assert page.text("#modules .nothing") == "Forward leaves nothing for backward in this step."
    page.mouse("mouseMoved", *chart_place(page, 0))
    page.press(".chart", "\ue014")
    assert page.overflow() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_never_scrolls_sideways(page: Page, scheme: str) -> None:
    long = ".".join(["a_module_with_a_very_long_name" * 3] * 3)
    for step in (hostile_step(long), RECOMPUTED):
        for size in (PHONE, LAPTOP):
            page.open(step, against=STEP, gains=(replace(GAINS[0], path=long),), size=size, scheme=scheme)
            assert page.overflow() == 0


def test_the_page_is_dark_where_people_want_it_dark(page: Page) -> None:
    found = {}
    for scheme in ("light", "dark"):
        page.open(STEP, scheme=scheme)
        code = "const style = getComputedStyle(document.documentElement); return [style.backgroundColor, style.color]"
        found[scheme] = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in page.script(code)]
    assert found["light"][0] > 700 > 150 > found["light"][1]
    assert found["dark"][0] < 150 < 600 < found["dark"][1]


def test_everything_that_takes_input_has_a_name(page: Page) -> None:
    page.open(RECOMPUTED, against=STEP, gains=GAINS)
    tree = page.command("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "link", "slider", "searchbox", "textbox", "combobox", "navigation", "complementary", "table")
    seen = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles]
    assert {node["role"]["value"] for node in seen} >= {"button", "link", "slider", "searchbox", "combobox", "table"}
    assert [node for node in seen if not node["name"]["value"]] == []
