"""The examples are scripts, and run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import environment

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
ARGUMENTS = {"train.py": ["--steps", "2"]}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *ARGUMENTS.get(script.name, [])],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
