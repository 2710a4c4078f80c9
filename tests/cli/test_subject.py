"""What a function gives to be profiled: which results mean a model and its inputs, and which are refused."""

from pathlib import Path

import pytest

from recollect._core.calls import Phase
from tests.cli.conftest import Invoke
from tests.cli.taking import take

pytest.importorskip("typer")


def test_a_list_that_starts_with_a_model_is_the_model_and_its_inputs(invoke: Invoke, folder: Path) -> None:
    (folder / "listed.py").write_text("import train\ndef make():\n    return [*train.make_model()]\n", "utf-8")
    profile = take(invoke, "listed.py:make")
    assert (profile.name, profile.calls[-1].phase) == ("Sequential", Phase.BACKWARD)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "{'model': 1}",
            (
                "odd.py:make returned a mapping without a model: "
                "expected 'model', a torch.nn.Module, or 'step', a function"
            ),
        ),
        (
            "{'modle': torch.nn.Linear(1, 1)}",
            (
                "odd.py:make returned a mapping with 'modle'; known keys are model, inputs, kwargs, optimizer, loss, "
                "step; did you mean 'model'?"
            ),
        ),
        (
            "{'step': 5}",
            "odd.py:make returned a mapping whose 'step' is 5: expected a function without arguments",
        ),
    ],
)
def test_a_mapping_that_says_nothing_is_refused(invoke: Invoke, folder: Path, returned: str, message: str) -> None:
    (folder / "odd.py").write_text(f"import torch\ndef make():\n    return {returned}\n", "utf-8")
    done = invoke("profile", "odd.py:make")
    assert (done.code, done.err) == (2, f"error: {message}\n")


ONLY_BEGINS = "which does nothing when it is called: name a function that"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "async def make(): print('ran')",
            f"odd.py:make is a coroutine, {ONLY_BEGINS} calls asyncio.run(...)",
        ),
        (
            "def make(): yield",
            f"odd.py:make is a generator, {ONLY_BEGINS} loops over it",
        ),
        (
            "async def run(): pass\ndef make(): return run",
            f"what odd.py:make returned is a coroutine, {ONLY_BEGINS} calls asyncio.run(...)",
        ),
        (
            "async def run(): pass\ndef make(): return {'step': run}",
            f"'step' of what odd.py:make returned is a coroutine, {ONLY_BEGINS} calls asyncio.run(...)",
        ),
    ],
    ids=["coroutine", "generator", "returned", "in a mapping"],
)
def test_a_function_that_only_begins_when_it_is_called_is_refused(
    invoke: Invoke, folder: Path, source: str, message: str
) -> None:
    (folder / "odd.py").write_text(f"{source}\n", "utf-8")
    done = invoke("profile", "odd.py:make")
    assert (done.code, done.out, done.err) == (2, "", f"error: {message}\n")
