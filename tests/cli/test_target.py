"""What a target may not be; what it may is in `test_profile`."""

from pathlib import Path

import pytest

from tests.cli.conftest import Invoke

pytest.importorskip("typer")


@pytest.mark.parametrize("function", ["", ":make"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nb.ipynb",
            "a notebook: save it as a script (`jupyter nbconvert --to script`), or call recollect.profile in it",
        ),
        ("step.json", "not a script: to show a profile, use `recollect report`"),
    ],
)
def test_a_file_that_is_no_python_is_refused_by_its_ending(
    invoke: Invoke, folder: Path, name: str, message: str, function: str
) -> None:
    (folder / name).write_text('{"cells": []}', "utf-8")
    done = invoke("profile", name + function)
    assert (done.code, done.err) == (2, f"error: {name} is {message}\n")
