"""The tables of real models are what the script makes of the figures that are kept: nothing is written by hand."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = {"torch": "2.11.0", "python": "3.12.3", "device": "GPU", "recollect": "abc"}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(candidate: str, best_ms: float, mib: int, **ratios: float) -> dict[str, object]:
    return {"candidate": candidate, "best_ms": best_ms, "peak_bytes": mib * 2**20, **ratios}


def _file(*rows: dict[str, object], name: str = "eager gpt", **environment: str) -> dict[str, object]:
    return {"environment": MEASURED | environment, "cases": [{"name": name, "title": "GPT", "rows": list(rows)}]}


def test_the_page_is_what_the_script_makes_of_the_kept_figures(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    kept = json.loads((ROOT / "benchmarks" / "real_models.json").read_text("utf-8"))
    assert tables.filled(page, kept) == page, "run `python benchmarks/tables.py`"


def test_figures_that_are_measured_again_replace_the_old_ones(tables: ModuleType) -> None:
    old = tables.kept({"cases": []}, [_file(_row("plain", 1.0, 5)), _file(name="eager vit")])
    new = tables.kept(old, [_file(_row("plain", 2.0, 5), recollect="def")])
    assert [case["name"] for case in new["cases"]] == ["eager gpt", "eager vit"]
    assert new["cases"][0]["rows"][0]["best_ms"] == 2.0
    assert [case["environment"]["recollect"] for case in new["cases"]] == ["def", "abc"]


def test_figures_say_which_commit_they_are_of(tables: ModuleType) -> None:
    file = _file(_row("plain", 1.0, 5))
    file["environment"] = {"torch": "2.11.0", "python": "3.12.3", "device": "GPU"}
    with pytest.raises(ValueError, match="do not say what was measured"):
        tables.kept({"cases": []}, [file])
    (case,) = tables.kept({"cases": []}, [file], "abc")["cases"]
    assert tables.described([case]).startswith("GPU, torch 2.11.0, Python 3.12.3; recollect at `abc`. ")


def test_losses_are_bold_and_peaks_are_compared_with_the_switch(tables: ModuleType) -> None:
    rows = [
        _row("plain", 1.0, 10),
        _row("recollect full", 1.3, 6, **{"best/switch": 1.004}),
        _row("its own switch", 1.295, 5, **{"best/switch": 1.0}),
        _row("recollect selective", 1.35, 7, **{"best/switch": 1.04, "best/full": 1.04}),
    ]
    text = tables.table([{"title": "GPT", "rows": rows}])
    assert "| recollect full | 1.3 | 1.00 |  | 6 | **1.20** |" in text
    assert "| recollect selective | 1.4 | 1.04 | **1.04** | 7 | 1.40 |" in text


def test_a_page_without_a_place_is_refused_and_a_kind_without_figures_stays(tables: ModuleType) -> None:
    kept = tables.kept({"cases": []}, [_file(_row("plain", 1.0, 5))])
    with pytest.raises(ValueError, match="the page has no place"):
        tables.filled("# Benchmarks\n", kept)
    page = "<!-- table: real_models small -->\nas it was\n<!-- end -->\n"
    assert tables.filled(page, kept) == page
