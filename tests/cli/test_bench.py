"""`recollect bench`: which cells it measures, how it goes on, and what it says when one fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recollect._bench import run
from recollect._bench.results import Cell, Measured, Results
from tests.bench.figures import MEASURED, REACHED
from tests.cli.conftest import Invoke

pytest.importorskip("typer")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Cell, dict[str, Any]]]:
    """What was measured; ResNet fails."""
    found: list[tuple[Cell, dict[str, Any]]] = []

    def run_cell(cell: Cell, **how: Any) -> Measured:
        found.append((cell, how))
        if cell.model == "ResNet":
            message = "it broke"
            raise run.CellFailedError(message)
        measured = REACHED if cell.mode.startswith("largest") else MEASURED
        return replace(measured, cell=cell, is_quick=how["is_quick"])

    monkeypatch.setattr(run, "run_cell", run_cell)
    return found


def test_a_quick_run_looks_at_all_models_once(invoke: Invoke, asked: list[Any], folder: Path) -> None:
    done = invoke("bench", "--quick", "--device", "cpu")
    assert done.code == 1  # ResNet
    assert [(cell.model, cell.size, cell.mode) for cell, _ in asked] == [
        (model, "small", "eager") for model in ("Llama", "ResNet", "GPT", "MoE", "ViT", "U-Net")
    ]
    assert "ResNet, small, eager: failed: it broke" in done.err
    assert len(Results.read(folder / "bench.json").measured) == 5
    assert "torch SAC" in done.out
    assert "save_on_cpu: out of memory" in done.out


def test_a_run_goes_on_where_it_stopped(invoke: Invoke, asked: list[Any]) -> None:
    assert invoke("bench", "Llama", "--device", "cpu", "--size", "small").code == 0
    asked.clear()
    done = invoke("bench", "llama", "--device", "cpu")
    assert [cell.size for cell, _ in asked] == ["large"]
    assert "Llama, small, eager" in done.out
    invoke("bench", "llama", "--device", "cpu", "--again")
    assert len(asked) == 3


def test_nothing_is_begun_once_the_time_is_up(invoke: Invoke, asked: list[Any]) -> None:
    done = invoke("bench", "Llama", "GPT", "--device", "cpu", "--size", "small", "--limit", "0")
    assert done.code == 0
    assert asked == []
    assert "GPT, small, eager: skipped, the time is up" in done.err


def test_the_largest_is_looked_for_within_a_budget(invoke: Invoke, asked: list[Any]) -> None:
    done = invoke("bench", "Llama", "--device", "cpu", "--size", "small", "--largest", "length", "--budget", "40GiB")
    assert done.code == 0, done.err
    assert asked[0][0].mode == "largest length"
    assert asked[0][1]["budget_bytes"] == 40 * 2**30
    assert "65,536" in done.out


def test_a_page_is_made_of_what_was_measured(invoke: Invoke, asked: list[Any], folder: Path) -> None:
    pytest.importorskip("matplotlib")
    invoke("bench", "Llama", "--device", "cpu", "--size", "small")
    (folder / "page.md").write_text("<!-- table: frontier -->\n<!-- end -->\n", "utf-8")
    done = invoke("bench", "--page", "page.md")
    assert done.code == 0, done.err
    assert done.err.splitlines() == ["wrote page.md", "wrote images/frontier-llama.svg", "wrote images/frontier.svg"]
    assert "not measured yet" in (folder / "page.md").read_text("utf-8")


def test_the_largest_goes_on_with_the_contenders_that_are_missing(
    invoke: Invoke, asked: list[Any], folder: Path
) -> None:
    options = ("bench", "Llama", "--device", "cpu", "--size", "small", "--largest", "length", "--budget", "40GiB")
    invoke(*options)
    (whole,) = Results.read(folder / "bench.json").measured
    part = replace(whole, reaches=whole.reaches[:1], is_partial=True)
    (folder / "bench.json").write_text(Results(measured=(part,)).to_json(), "utf-8")
    invoke(*options, "--limit", "100")
    assert asked[1][1]["known"] == ["recollect"]
    assert 0 < asked[1][1]["limit_s"] <= 100
    assert Results.read(folder / "bench.json").measured[-1].reaches == (whole.reaches[0], *whole.reaches)


def test_another_budget_is_another_measurement(invoke: Invoke, asked: list[Any]) -> None:
    options = ("bench", "Llama", "--device", "cpu", "--size", "small", "--largest", "length", "--budget")
    invoke(*options, "40GiB")
    invoke(*options, "20GiB")
    assert [how["budget_bytes"] for _, how in asked] == [40 * 2**30, 20 * 2**30]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("Bert",), "unknown model Bert: expected one or more of Llama, ResNet"),
        (("lama",), "GPT, MoE, ViT, U-Net; did you mean 'Llama'?"),
        (("--size", "smal"), "--size smal: expected small, large, or both; did you mean 'small'?"),
        (("--mode", "compile"), "--mode compile: expected eager, compiled, or both; did you mean 'compiled'?"),
        (("--largest", "lenght"), "--largest lenght: expected batch or length; did you mean 'length'?"),
        (("--size", "huge"), "--size huge: expected small, large, or both"),
        (("--mode", "lazy"), "--mode lazy: expected eager, compiled, or both"),
        (("llama,resnet",), "GPT, MoE, ViT, U-Net; write a space between several"),
        (("--budget", "1GiB"), "--budget is for --largest, as in --largest batch --budget 40GiB"),
        (("--largest", "width"), "--largest width: expected batch or length"),
        (("--largest", "batch"), "--largest needs --budget"),
        (("ViT", "--largest", "length", "--budget", "1GiB"), "--largest length: only the inputs of Llama, GPT, MoE"),
        (("--largest", "batch", "--budget", "lots"), "--budget: size 'lots'"),
        (("--device", "tpu"), "--device tpu: expected cpu or cuda"),
        (("--results", "x.txt"), "x.txt: the extension says what to write"),
        (("--page", "none.md"), "yet: run recollect bench without --page first"),
    ],
)
def test_wrong_usage_of_the_benchmarks_is_explained(
    invoke: Invoke, asked: list[Any], options: tuple[str, ...], message: str
) -> None:
    done = invoke("bench", *options)
    assert (done.code, message in done.err) == (2, True), done.err
    assert asked == []
