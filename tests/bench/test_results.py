"""What benchmarks measured survives as JSON, is appended to, found again, and compared with what others took."""

from dataclasses import replace
from pathlib import Path

import pytest

from recollect._bench.compare import compare
from recollect._bench.results import Results
from recollect._bench.run import append, list_cells
from tests.bench.figures import BETTER, CELL, FAILED, MEASURED, MIB, OURS, PLAIN, REACHED, SMALLER, WORSE


def test_results_survive_as_json() -> None:
    results = Results(measured=(MEASURED, REACHED))
    assert Results.from_json(results.to_json()) == results


def test_measurements_are_appended_and_the_last_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    append(path, MEASURED)
    later = replace(MEASURED, held_bytes=2 * MIB)
    assert append(path, later).find(CELL) == later
    assert Results.read(path).measured == (MEASURED, later)
    assert [one.name for one in tmp_path.iterdir()] == ["bench.json"]


def test_what_another_version_measured_is_missing_and_still_the_latest() -> None:
    results = Results(measured=(MEASURED,))
    other = replace(CELL, commit="def")
    assert results.find(other) is None
    assert results.latest(model="Llama", size="small", mode="eager", device="GPU") == MEASURED
    assert results.latest(model="Llama", size="small", mode="eager", device="TPU") is None


def test_a_look_does_not_stand_for_a_measurement() -> None:
    results = Results(measured=(replace(MEASURED, is_quick=True),))
    assert results.find(CELL, is_quick=False) is None
    assert results.find(CELL, is_quick=True) is not None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("{}", "utf-8")
    with pytest.raises(ValueError, match="expected a recollect bench, found something else"):
        Results.read(path)


def test_medians_and_spreads_come_from_the_rounds() -> None:
    assert PLAIN.median_s == 1.0
    assert PLAIN.spread == pytest.approx(0.04)
    assert (FAILED.median_s, FAILED.spread) == (None, None)


def test_contenders_stand_beside_the_plain_step_and_beside_ours_at_their_peak() -> None:
    rows = {row.figure.contender: row for row in compare(MEASURED)}
    assert rows["torch full"].share == pytest.approx(0.5)
    assert rows["torch full"].cost == pytest.approx(0.3)
    assert rows["torch full"].ours == pytest.approx(0.1)
    assert rows["torch_remat"].ours is None
    assert rows["save_on_cpu"].cost is None


def test_losses_are_where_ours_is_slower_or_does_not_reach() -> None:
    lost = {row.figure.contender for row in compare(MEASURED) if row.is_lost}
    assert lost == {BETTER.contender, SMALLER.contender}
    assert not {PLAIN.contender, OURS.contender, WORSE.contender, FAILED.contender} & lost


def test_without_a_plain_step_nothing_is_compared() -> None:
    rows = compare(replace(MEASURED, figures=(WORSE,)))
    assert [(row.figure, row.cost) for row in rows] == [(WORSE, None)]


def test_the_models_that_are_to_be_complete_come_first() -> None:
    cells = list_cells(["ViT", "ResNet", "Llama"], ["small", "large"], ["eager"], device="", torch="", commit="")
    assert [cell.model for cell in cells] == ["Llama", "Llama", "ResNet", "ResNet", "ViT", "ViT"]
