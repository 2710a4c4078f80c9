"""The page of a plan: what every budget gives, chosen by a slider, in one file that needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from recollect._core.alternatives import Alternative, MemoryTrack
from recollect._core.forecasts import CurvePoint, Forecast, PlannedRegion
from recollect._core.levers import PlannedLever
from recollect._core.plans import Plan
from recollect._report.plan_html import write_plan_html
from tests.report.browser import PHONE, Page
from tests.report.steps import transformer_step

STEP = transformer_step(2)
MIB = 2**20
REGIONS = tuple(PlannedRegion(path=f"layers.{at}", kind="Block", way="rerun", plain_bytes=MIB) for at in range(2))


def alternative(peak_bytes: int, step_s: float, regions: tuple[PlannedRegion, ...] = REGIONS) -> Alternative:
    memory = MemoryTrack(ends_s=(step_s / 2, step_s), bytes=(peak_bytes // 2, peak_bytes))
    return Alternative(peak_bytes=peak_bytes, step_s=step_s, regions=regions, memory=memory)


OFFERED = (alternative(8 * MIB, 1.0, ()), alternative(6 * MIB, 1.1, REGIONS[:1]), alternative(4 * MIB, 1.3))
FORECAST = Forecast(
    peak_bytes=6 * MIB,
    step_s=1.1,
    plain_peak_bytes=8 * MIB,
    plain_step_s=1.0,
    budget="7MiB",
    budget_bytes=7 * MIB,
    policies=(CurvePoint(peak_bytes=5 * MIB, step_s=1.5, name="full"),),
)
PLAN = Plan(name="GPT within 7MiB", regions=REGIONS[:1], forecast=FORECAST, notes=("a note",))


def text_of(plan: Plan = PLAN, margin_share: float = 0.0) -> str:
    return write_plan_html(plan, STEP, OFFERED, margin_share=margin_share)


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def slide(page: Page, budget: int) -> None:
    code = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    page.script(code, page.one("#budget"), str(budget))
    page.wait_for_frame()


def test_the_plan_itself_is_among_what_the_page_offers_even_if_it_was_thinned_out() -> None:
    other = replace(PLAN, forecast=replace(FORECAST, peak_bytes=5 * MIB, step_s=1.2))
    data = data_of(text_of(other))
    assert [one["peak_bytes"] // MIB for one in data["alternatives"]] == [8, 6, 5, 4]
    assert data["alternatives"][data["chosen"]]["peak_bytes"] == 5 * MIB


def test_of_a_plan_with_levers_the_page_says_only_what_is_known(page: Page) -> None:
    lever = PlannedLever(name="micro_batches", parts=2)
    plan = replace(PLAN, levers=(lever,), forecast=replace(FORECAST, peak_bytes=3 * MIB, step_s=1.6))
    page.open_text(text_of(plan))
    assert page.text("#regions-lead").startswith("Levers: micro_batches: 2 to a batch.")
    assert page.text("#timeline-lead").endswith("After: at most what the plan takes at its peak.")
    slide(page, 6 * MIB)
    assert page.text("#timeline-lead").endswith("After: as the plan is predicted to run.")
    assert "Levers" not in page.text("#regions-lead")


def test_a_plan_written_by_hand_has_no_page() -> None:
    with pytest.raises(ValueError, match="has no forecast: it was written by hand"):
        text_of(Plan(name="mine"))


def test_regions_that_are_treated_the_same_share_a_row() -> None:
    rows = data_of(text_of())["alternatives"][-1]["regions"]
    assert [(row["path"], row["count"], row["plain_bytes"]) for row in rows] == [("layers.0-1", 2, 2 * MIB)]


def test_the_page_opens_with_what_was_asked_for(page: Page) -> None:
    page.open_text(text_of())
    assert page.text("h1") == "GPT within 7MiB"
    assert page.text("#budget-text") == "7.00 MiB"
    assert page.text("#fit") == "Within 7.00 MiB: the step takes 10.0% longer than the plain one."
    assert "6.00 MiB" in page.text("#facts")
    assert "75% of the plain step" in page.text("#facts")
    assert page.text("#code code") == 'recollect.fit(model, batch, budget="7.00MiB")'
    assert page.text("#notes") == "a note"


def test_sliding_the_budget_shows_another_plan_everywhere(page: Page) -> None:
    page.open_text(text_of())
    before = page.one("#timeline-view .curve.after").get_attribute("d")
    slide(page, 5 * MIB)
    assert page.text("#budget-text").startswith("5.0")
    assert "30.0% longer" in page.text("#fit")
    assert "4.00 MiB" in page.text("#facts")
    assert page.text("#regions-lead") == "2 modules become regions; everything else runs as before."
    assert page.column("#regions-view td.module") == ["layers.0-1"]
    assert page.one("#timeline-view .curve.after").get_attribute("d") != before
    assert "4.00 MiB, 1.30 s" in page.text("#frontier-view")
    page.click("#asked")
    assert page.text("#budget-text") == "7.00 MiB"
    assert "6.00 MiB" in page.text("#facts")


def test_a_budget_of_the_plain_step_recomputes_nothing(page: Page) -> None:
    page.open_text(text_of())
    slide(page, 9 * MIB)
    assert "takes no longer than the plain one" in page.text("#fit")
    assert page.text("#regions-lead") == "Nothing: the step runs as before."


def test_keys_slide_the_budget_and_say_it(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open_text(text_of())
    page.press("#budget", Keys.HOME)
    assert page.one("#budget").get_attribute("aria-valuetext") == "4.00 MiB"
    assert "4.00 MiB" in page.text("#facts")


def test_a_click_on_a_point_chooses_it(page: Page) -> None:
    page.open_text(text_of())
    code = """
        const dot = document.querySelectorAll('.frontier .dot')[2];
        dot.scrollIntoView({block: 'center', behavior: 'instant'});
        const box = dot.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
    """
    x, y = page.script(code)
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, x, y, button="left", clickCount=1)
    assert "4.00 MiB" in page.text("#facts")


def test_plans_stay_below_a_budget_by_the_margin(page: Page) -> None:
    page.open_text(text_of(margin_share=0.2))
    slide(page, 7 * MIB)  # 5.6 MiB are left of it
    assert "4.00 MiB" in page.text("#facts")
    assert page.text("#code code") == 'recollect.fit(model, batch, budget="7.00MiB")'


def test_policies_are_called_simulated_and_shown_beside_the_plan_at_their_peak(page: Page) -> None:
    page.open_text(text_of())
    rows = page.column("#policies-view tbody tr")
    assert len(rows) == 2
    assert "plain step" in rows[0]
    assert all(word in rows[1] for word in ("A", "full", "5.00 MiB", "+50.0% over plain", "+30.0% over plain"))
    assert rows[1].endswith("simulated")
    assert len(page.all(".frontier .letter")) == 2


def test_what_was_measured_is_a_cross_and_stands_beside_the_prediction(page: Page) -> None:
    measured = replace(FORECAST, measured_peak_bytes=6 * MIB + MIB // 4, measured_step_s=1.15)
    page.open_text(text_of(replace(PLAN, forecast=measured)))
    assert len(page.all(".frontier .cross")) == 1
    assert "measured 6.25 MiB" in page.text("#facts")
    assert "measured 1.15 s" in page.text("#facts")
    slide(page, 5 * MIB)
    assert "measured" not in page.text("#facts")


@pytest.mark.parametrize("step_s", [1.02, 1.08, 1.12, 1.18, 1.25])
def test_the_label_of_what_was_measured_and_that_of_the_plan_do_not_lie_on_each_other(
    page: Page, step_s: float
) -> None:
    forecast = replace(FORECAST, measured_peak_bytes=6 * MIB, measured_step_s=step_s)
    page.open_text(text_of(replace(PLAN, forecast=forecast)))
    code = """
        const boxes = ['.mark.after', '.cross-label'].map((mark) =>
          document.querySelector(`.frontier ${mark}`).getBoundingClientRect());
        const [one, other] = boxes;
        const [wide, high] = [one.right - other.left, one.bottom - other.top - 2];
        return wide > 0 && other.right > one.left && high > 0 && other.bottom - 2 > one.top;
    """
    assert page.script(code) is False


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_plan_never_scrolls_sideways(page: Page, scheme: str) -> None:
    page.open_text(text_of(), size=PHONE, scheme=scheme)
    assert page.overflow() <= 0


@pytest.mark.parametrize("name", ["</script><script>alert(2)</script>", "{{script}}", "<img src=x onerror=alert(3)>"])
def test_names_are_shown_as_they_are_and_do_nothing_in_a_plan(page: Page, name: str) -> None:
    regions = (replace(REGIONS[0], path=name, kind=name, keeps=name),)
    offered = (alternative(6 * MIB, 1.1, regions),)
    policies = (CurvePoint(peak_bytes=5 * MIB, step_s=1.5, name=name),)
    plan = Plan(name=name, regions=regions, forecast=replace(FORECAST, policies=policies), notes=(name,))
    page.open_text(write_plan_html(plan, STEP, offered))
    assert page.text("h1") == name
    assert page.text("#notes") == name
    assert name in page.text("#regions-view")


def test_everything_that_takes_input_on_the_page_of_a_plan_has_a_name(page: Page) -> None:
    page.open_text(text_of())
    code = """
        return [...document.querySelectorAll('button, input')].filter((element) =>
          !element.textContent && !element.getAttribute('aria-label') && !element.labels?.length).length
    """
    assert page.script(code) == 0
