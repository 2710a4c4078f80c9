"""The scripts in benchmarks/ can be loaded: nobody runs most of them here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
LOAD = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_every_script_can_be_loaded() -> None:
    for package in ("rich", "scipy", "torch_remat", "transformers"):
        pytest.importorskip(package)
    names = sorted(path.stem for path in SCRIPTS.glob("*.py"))
    assert "frontier" in names
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(SCRIPTS), *names], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["offload.py", "overhead.py"])
def test_a_script_says_in_a_line_that_its_device_is_missing(script: str) -> None:
    for package in ("rich", "scipy", "torch_remat", "transformers"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--device", "cuda"],
        check=False, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"{script}: error: --device cuda: torch finds no CUDA device on this machine"
