"""What a target may not be; what it may is in `test_profile`."""

from pathlib import Path

import pytest

from tests.cli.conftest import Invoke

pytest.importorskip("typer")

FORMS = "expected module:function, path/to/file.py:function or path/to/script.py"
ALONE = """
import torch
from torch import nn

STEPS = 5

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return super().forward(x)

class Constant(Net):
    def forward(self):
        return self.weight.sum()

def alone():
    return nn.LSTM(2, 2)
"""


@pytest.mark.parametrize("function", ["", ":make"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nb.ipynb",
            "a notebook: save it as a script (`jupyter nbconvert --to script`), or call recollect.profile in it",
        ),
        (
            "step.json",
            "not a script: to show a profile, use `recollect report`; to plan for one, `recollect plan`",
        ),
    ],
)
def test_a_file_that_is_no_python_is_refused_by_its_ending(
    invoke: Invoke, folder: Path, name: str, message: str, function: str
) -> None:
    (folder / name).write_text('{"cells": []}', "utf-8")
    done = invoke("profile", name + function)
    assert (done.code, done.err) == (2, f"error: {name} is {message}\n")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("notes.txt:make", f"notes.txt is not a Python file: {FORMS}"),
        ("https://host:8000/train", f"target 'https://host:8000/train': {FORMS}"),
        ("train", f"target 'train': {FORMS}; did you mean 'train.py', or a function in it, 'train:function'?"),
        ("train.alone", f"target 'train.alone': {FORMS}; did you mean 'train:alone'?"),
        ("train.py:alone.step", "train.py:alone has no 'step'"),
        ("train.py:STEPS", "'STEPS' of train.py is an int; expected a function that can be called without arguments"),
        (
            "train.py:Net",
            "train.py:Net returned a model, a Net, without its inputs, (x): let it return (model, *inputs)",
        ),
        ("train.py:alone", "train.py:alone returned a model, an LSTM, without its inputs, (input, hx): let it return "),
    ],
)
def test_what_cannot_be_run_is_refused(invoke: Invoke, folder: Path, target: str, message: str) -> None:
    (folder / "notes.txt").write_text("buy milk", "utf-8")
    (folder / "train.py").write_text(ALONE, "utf-8")
    for command in (("profile",), ("fit", "--budget", "1GiB")):
        done = invoke(*command, target)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {message}")


def test_a_model_that_needs_no_inputs_is_profiled(invoke: Invoke, folder: Path) -> None:
    (folder / "train.py").write_text(ALONE, "utf-8")
    assert invoke("profile", "train.py:Constant", "--quiet").code == 0
