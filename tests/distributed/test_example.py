"""The example of a parallel training loop runs under torchrun, and trains the same under any budget."""

import contextlib
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import Ranks

ROOT = Path(__file__).parents[2]


OPTIONS = ["--steps", "2", "--layers", "2"]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def train_parallel(*options: str) -> tuple[list[str], str]:
    """The losses of this process as they are printed, and all that it prints."""
    example, said = load("parallel"), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.simplefilter("ignore")  # of DTensor and Dynamo, as the script leaves them
        losses: list[float] = example.train(example.parse([*OPTIONS, *options]), "cpu")
    return [f"{loss:.4f}" for loss in losses], said.getvalue()


@functools.cache
def losses_within_least(ranks: Ranks, *options: str) -> tuple[list[str], str]:
    """What the first rank says of a run that keeps as little as it can."""
    said, _ = ranks.run(train_parallel, *options, "--budget", "min")
    return said


@pytest.mark.parametrize("options", [[], ["--tensor-parallel", "2"]], ids=["sharded", "split"])
def test_the_example_trains_the_same_within_a_budget(options: list[str], ranks: Ranks) -> None:
    pytest.importorskip("scipy")
    least, said = losses_within_least(ranks, *options)
    (plain, said_plainly), _ = ranks.run(train_parallel, *options, "--budget", "1TiB")
    assert len(plain) == 2
    assert least == plain
    assert "apply: 0 regions in Model" in said_plainly
    assert "apply: 0 regions in Model" not in said


def test_torchrun_starts_the_example(ranks: Ranks) -> None:
    pytest.importorskip("scipy")
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "parallel.py"), *OPTIONS, "--budget", "min", "--backend", "eager"]
    done = subprocess.run([*command, *example], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, _ = losses_within_least(ranks)
    assert re.findall(r"loss ([\d.]+)", done.stdout) == losses


def fit_sharded(budget: str) -> list[float]:
    example = load("fit_sharded")
    options = ["--layers", "2", "--dim", "16", "--length", "32", "--steps", "2", "--budget", budget]
    found: list[float] = example.train(example.parse(options), "cpu")
    return found


def test_the_example_of_a_sharded_fit_trains_the_same_within_a_budget(ranks: Ranks) -> None:
    pytest.importorskip("scipy")
    assert ranks.run(fit_sharded, "90%") == ranks.run(fit_sharded, "1TiB")
