"""The example of a parallel training loop runs under torchrun, and trains the same under any budget."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import Ranks

ROOT = Path(__file__).parents[2]


def losses(*options: str) -> list[str]:
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "parallel.py"), "--steps", "2", "--layers", "2"]
    done = subprocess.run(
        [*command, *example, *options], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("apply: 0 regions in Model" in done.stdout) == ("1TiB" in options), done.stdout
    return re.findall(r"loss ([\d.]+)", done.stdout)


@pytest.mark.parametrize("options", [[], ["--tensor-parallel", "2"]], ids=["sharded", "split"])
def test_the_example_trains_the_same_within_a_budget(options: list[str]) -> None:
    pytest.importorskip("scipy")
    found = losses(*options, "--budget", "min")
    assert len(found) == 2
    assert found == losses(*options, "--budget", "1TiB")


def fit_sharded(budget: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("fit_sharded", ROOT / "examples" / "fit_sharded.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = ["--layers", "2", "--dim", "16", "--length", "32", "--steps", "2", "--budget", budget]
    found: list[float] = example.train(example.parse(options), "cpu")
    return found


def test_the_example_of_a_sharded_fit_trains_the_same_within_a_budget(ranks: Ranks) -> None:
    pytest.importorskip("scipy")
    assert ranks.run(fit_sharded, "90%") == ranks.run(fit_sharded, "1TiB")
