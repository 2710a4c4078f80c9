"""The examples are scripts, and run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import environment

FOLDER = Path(__file__).parents[2] / "examples"
ELSEWHERE = {
    "accelerate_sharded.py",  # run by tests/distributed/test_accelerate.py
    "fine_tune.py",  # by tests/integrations/test_trl.py
    "fit_sharded.py",  # by tests/distributed/test_example.py
    "parallel.py",  # likewise
}
EXAMPLES = sorted(script for script in FOLDER.glob("*.py") if script.name not in ELSEWHERE)
ARGUMENTS = {"train.py": ["--steps", "2"]}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_an_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *ARGUMENTS.get(script.name, [])])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


def test_an_example_needs_nothing_but_its_imports(tmp_path: Path) -> None:
    script = [str(FOLDER / "policies_side_by_side.py")]
    done = subprocess.run(
        [sys.executable, "-W", "error", *script],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_notebook_runs_and_shows_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((FOLDER / "report.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells:
        source = "".join(cell["source"])
        if "IPython" not in source:
            exec(source, names)
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert (tmp_path / "compare.html").exists()
    kinds = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
