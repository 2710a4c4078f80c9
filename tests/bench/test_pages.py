"""The page of the benchmarks is made of what was measured: one table and one plot per model, what is missing said."""

from dataclasses import replace
from pathlib import Path

import pytest

from recollect._bench.names import MODELS, TITLES
from recollect._bench.pages import (
    describe_run,
    fill_page,
    find_cells,
    write_largest,
    write_missing,
    write_page,
    write_table,
)
from recollect._bench.results import Results
from tests.bench.figures import FAILED, MEASURED, OURS, PLAIN, REACHED, WORSE

RESULTS = Results(measured=(MEASURED, REACHED))
PAGE = "# Benchmarks\n\n<!-- table: frontier -->\nstale words\n<!-- end -->\n\nMore.\n"


def test_losses_are_set_in_bold_and_counted() -> None:
    table = "\n".join(write_table(find_cells(RESULTS, "Llama", "GPU")))
    assert "| torch SAC | 7.00 MiB | 60% | 1.05 s | +5.0% | 0.0% | **+10.0%** |" in table
    assert "| torch_remat | 3.00 MiB | 20% | 1.50 s | +50.0% | 0.0% | **none** |" in table
    assert "| torch full | 6.00 MiB | 50% | 1.30 s | +30.0% | 0.0% | +10.0% |" in table
    assert "Rivals have 3 figures. In 2 of them, set in bold, recollect is slower" in describe_run(RESULTS, "GPU")


def test_what_is_missing_and_what_failed_is_said() -> None:
    cells = find_cells(RESULTS, "Llama", "GPU")
    assert list(write_missing(cells)) == ["* No figures for save_on_cpu (small, eager): out of memory", ""]
    table = list(write_table(cells))
    assert not any("save_on_cpu" in line for line in table)
    assert sum("not measured yet" in line for line in table) == 3


def test_contenders_that_are_missing_for_one_reason_share_a_line() -> None:
    other = replace(FAILED, contender="offload")
    cells = dict(find_cells(RESULTS, "Llama", "GPU"))
    cells["large", "eager"] = cells["small", "eager"] = replace(MEASURED, figures=(PLAIN, FAILED, other))
    assert list(write_missing(cells)) == [
        "* No figures for save_on_cpu; offload (small, eager; large, eager): out of memory",
        "",
    ]


def test_the_largest_sizes_have_tables_of_their_own() -> None:
    lines = list(write_largest(RESULTS, "GPU"))
    assert lines[0] == "### Llama, small: largest length within 40.00 GiB"
    assert any(line.startswith("| recollect | 65,536 | 39.00 GiB |") for line in lines)
    assert any("plain | none fits" in line for line in lines)


def test_the_page_in_the_docs_is_what_the_figures_beside_it_make() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "benchmarks.md").read_text("utf-8")
    results = Results.read(root / "benchmarks" / "h200.json")
    made = fill_page(results, text, device="NVIDIA H200")
    assert made == text, "run `recollect bench --results benchmarks/h200.json --page docs/benchmarks.md`"


def test_models_without_a_figure_share_a_line() -> None:
    page = fill_page(RESULTS, PAGE, device="GPU")
    missing = ", ".join(TITLES.get(model, model) for model in MODELS if model != "Llama")
    assert f"Not measured yet, at any size, eager or compiled: {missing}.\n" in page
    assert next(line for line in page.splitlines() if line.startswith("### ")) == "### Llama"


def test_a_page_gets_tables_and_plots_and_keeps_all_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "benchmarks.md"
    page.write_text(PAGE, "utf-8")
    written = write_page(RESULTS, page, device="GPU")
    text = page.read_text("utf-8")
    assert [path.name for path in written] == ["benchmarks.md", "frontier-llama.svg", "frontier.svg"]
    assert "stale words" not in text
    assert text.endswith("More.\n")
    assert "![Llama: step time against peak memory](images/frontier-llama.svg)" in text
    assert text.count("### ") == 2  # what was measured: a frontier, and the largest length
    picture = (tmp_path / "images" / "frontier-llama.svg").read_bytes()
    write_page(RESULTS, page, device="GPU")
    assert page.read_text("utf-8") == text
    assert (tmp_path / "images" / "frontier-llama.svg").read_bytes() == picture


@pytest.mark.parametrize(
    ("text", "device", "message"),
    [("# nothing", "GPU", "has no markers for the tables"), (PAGE, "TPU", "nothing was measured on 'TPU'")],
)
def test_a_page_without_a_place_or_a_device_without_figures_is_refused(
    tmp_path: Path, text: str, device: str, message: str
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        write_page(RESULTS, page, device=device)


def test_a_page_that_does_not_exist_is_begun(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "new.md"
    with pytest.raises(ValueError, match="nothing was measured"):
        write_page(RESULTS, page, device="TPU")
    assert not page.exists()
    assert page in write_page(RESULTS, page, device="GPU")
    first = page.read_text("utf-8")
    assert first.startswith("# Benchmarks\n")
    assert "| size, mode | way |" in first
    write_page(RESULTS, page, device="GPU")
    assert page.read_text("utf-8") == first


def test_what_takes_far_longer_is_named_with_its_number() -> None:
    pytest.importorskip("matplotlib")
    from recollect._bench.plot import draw_frontier

    slow = replace(WORSE, contender="slow", rounds_s=(6.0,))
    picture = draw_frontier("Llama", replace(MEASURED, figures=(PLAIN, OURS, slow)))
    near = draw_frontier("Llama", replace(MEASURED, figures=(PLAIN, OURS, WORSE)))
    assert b"slow: +500% at 50%" in picture
    assert b"off the scale" not in near


def test_plans_that_may_use_host_memory_have_a_line_of_their_own() -> None:
    pytest.importorskip("matplotlib")
    from recollect._bench.plot import draw_frontier

    sent = replace(OURS, contender=f"{OURS.contender}, host")
    assert b"recollect, host memory" in draw_frontier("Llama", replace(MEASURED, figures=(PLAIN, OURS, sent)))
    assert b"host memory" not in draw_frontier("Llama", replace(MEASURED, figures=(PLAIN, OURS)))
