"""The commands that the page on the command line shows work as they stand there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke

pytest.importorskip("typer")

ROOT = Path(__file__).parents[2]
SHOWN = re.findall(r"^\$ recollect (.*)$", (ROOT / "docs" / "cli.md").read_text("utf-8"), re.MULTILINE)
LONG = ("doctor", "demo", "bench")  # and searches, which test_plan.py tries on a smaller model


@pytest.fixture
def place(folder: Path) -> Path:
    """A folder with the examples, and profiles by the names that the page uses."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", [line for line in SHOWN if not line.startswith(LONG) and "--unknown" not in line])
def test_a_command_of_the_page_works(invoke: Invoke, command: str) -> None:
    for name in ("step.json", "before.json", "after.json"):
        if name in command and command.startswith(("report", "plan")):
            assert invoke("profile", "train.py:make_model", "--json", name).code == 0
    done = invoke(*shlex.split(command))
    assert done.code == 0, done.err
    assert done.out or done.err.startswith("wrote ")


def test_the_page_shows_every_command() -> None:
    assert {line.split()[0] for line in SHOWN} >= {"profile", "report", "plan", "fit", "bench", "doctor"}
