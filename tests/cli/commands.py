"""Running commands as users do: in a process of their own, or, for speed, in this one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

COLOURING = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "CLICOLOR_FORCE", "TERM", "COLUMNS")
SOURCES = Path(__file__).parents[2] / "src"

TRAIN = """
import sys
import torch
from torch import nn

CALLS = []

def make_model():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)), torch.randn(32, 16)

def make_mapping():
    model, x = make_model()
    return {"model": model, "inputs": {"input": x}, "loss": lambda y: y.square().mean(), "optimizer": torch.optim.AdamW}

def make_step():
    model, x = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def step():
        print("a step of mine")
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    return step

STEP = make_step()

def run_step():
    CALLS.append("step")
    STEP()

def train(steps):
    for number in range(steps):
        print("step", number)
        STEP()

if __name__ == "__main__":
    train(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """The variables of this process without those that force or forbid colours."""
    kept = {name: value for name, value in os.environ.items() if name not in COLOURING}
    path = os.pathsep.join([str(SOURCES), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def recollect(*args: str, folder: Path, variables: Mapping[str, str] | None = None) -> Done:
    """Run the command line in a process of its own, with its output piped."""
    done = subprocess.run(
        [sys.executable, "-m", "recollect", *args],
        cwd=folder,
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return Done(done.returncode, done.stdout, done.stderr)
