"""`recollect demo`: what it promises holds: less memory, the same training, and a report that can be opened."""

import re
from pathlib import Path

import pytest

from recollect._cli import demo, small_gpt
from recollect._cli.report import make_report
from recollect._core.calls import Phase
from recollect._core.profiles import Profile
from tests.cli.conftest import Invoke

pytest.importorskip("typer")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of shorter texts show the same, within a larger part of what the plain step takes."""
    monkeypatch.setattr(small_gpt, "STEPS", 2)
    monkeypatch.setattr(small_gpt, "TOKENS", 128)
    monkeypatch.setattr(demo, "BUDGET_PERCENT", 85)


def test_the_demo_shows_less_memory_and_the_same_training(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Profile, Profile]] = []

    def report(profile: Profile, to: Path, *, against: Profile, top: int) -> None:
        compared.append((against, profile))
        make_report(profile, to, against=against, top=top)

    monkeypatch.setattr("recollect._cli.report.make_report", report)
    done = invoke("demo", "--quiet", "--html", "page.html")
    assert done.code == 0, done.err
    rows = {line[:20].strip(): line[20:].split() for line in done.out.splitlines() if "MiB" in line and " ms " in line}
    assert list(rows) == ["plain", "full", "attention kept", "products kept too"]
    peaks = {name: float(row[0]) for name, row in rows.items()}
    assert peaks["attention kept"] <= peaks["full"] < peaks["products kept too"] < peaks["plain"]
    assert [row[-1] for row in rows.values()][1:] == ["equal"] * 3
    assert "All 3 losses are equal, bit for bit." in done.out
    assert "recollect.apply(model, recollect.policies.save_attention)" in done.out
    assert str(folder / "page.html") in done.out
    assert "<html" in (folder / "page.html").read_text("utf-8")
    assert "85% of the plain step's" in done.out
    predicted, measured = re.findall(r"^ *peak +([\d.]+) MiB +([\d.]+) MiB", done.out, re.MULTILINE)[0]
    assert float(measured) == pytest.approx(float(predicted), rel=0.02)
    assert "<title>" in (folder / "page-plan.html").read_text("utf-8")
    ((before, after),) = compared
    assert (before.name, after.name) == ("plain", "attention kept")
    assert after.peak_bytes < before.peak_bytes
    assert Phase.RECOMPUTATION in {call.phase for call in after.calls}
    assert Phase.RECOMPUTATION not in {call.phase for call in before.calls}


def test_the_page_of_the_demo_has_a_name_where_none_is_given(invoke: Invoke) -> None:
    assert "recollect-demo.html" in invoke("demo", "--help").out


def test_the_page_of_the_demo_needs_an_ending_that_says_so(invoke: Invoke) -> None:
    done = invoke("demo", "--html", "page.txt")
    expected = "error: page.txt: the extension says what to write; expected .html\n"
    assert (done.code, done.err) == (2, expected)


def test_the_text_it_learns_from_is_sums() -> None:
    for sum_ in small_gpt.write_sums(200).split("; ")[:-1]:
        assert re.fullmatch(r"\d+\+\d+=\d+", sum_)
