"""The example of a parallel training loop runs under torchrun, and trains the same under any budget."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
