"""`recollect profile`: what a target may be, what is written where, and how failures are told apart."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as library
from recollect._core.calls import Category, Phase
from recollect._core.profiles import Profile
from tests.cli.commands import recollect
from tests.cli.conftest import Invoke
from tests.cli.taking import held, take

pytest.importorskip("typer")


LONG = "x" * 300


# What a target may be.


@pytest.mark.parametrize("target", ["train:make_model", "train.py:make_model", "./train.py:make_model"])
def test_a_function_that_returns_a_model_and_its_inputs_is_profiled(invoke: Invoke, target: str) -> None:
    profile = take(invoke, target)
    assert profile.name == "Sequential"
    assert {call.phase for call in profile.calls} == {Phase.FORWARD, Phase.BACKWARD}
    assert [module.path for module in profile.modules] == ["", "0", "1", "2"]


def test_a_mapping_names_keyword_inputs_loss_and_optimizer(invoke: Invoke) -> None:
    profile = take(invoke, "train.py:make_mapping")
    assert "aten.mean.default" in {call.op for call in profile.calls}
    assert profile.optimizer == "AdamW"


def test_a_function_that_returns_a_step_has_that_profiled_and_not_its_set_up(invoke: Invoke) -> None:
    profile = take(invoke, "train.py:make_step")
    assert {call.phase for call in profile.calls} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert not any("uniform" in call.op for call in profile.calls)


def test_a_function_that_is_the_step_runs_before_it_is_profiled(invoke: Invoke) -> None:
    profile = take(invoke, "train:run_step")
    assert len(sys.modules["train"].CALLS) > 2
    assert profile.optimizer == "SGD"
    assert held(profile, Category.OPTIMIZER) == held(profile, Category.PARAMETER)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.ones(2) + 1", "ran 2 operators but no backward, so nothing is saved for backward: return "),
        ("return {'loss': 1.0}", "ran no torch operators: name a function that runs a step, "),
    ],
)
def test_a_step_without_backward_is_refused(invoke: Invoke, folder: Path, body: str, message: str) -> None:
    (folder / "odd.py").write_text(f"import torch\ndef run():\n    {body}\n", "utf-8")
    done = invoke("profile", "odd.py:run")
    assert done.code == 1
    assert done.err.startswith(f"error: odd.py:run {message}")


# Options.


def test_the_dtype_is_that_of_the_model_and_its_inputs(invoke: Invoke) -> None:
    full, half = take(invoke, "train.py:make_model"), take(invoke, "train.py:make_model", "--dtype", "bf16")
    assert held(half, Category.PARAMETER) * 2 == held(full, Category.PARAMETER)
    assert torch.get_default_dtype() == torch.float32


def test_the_device_is_where_the_model_is_put(invoke: Invoke) -> None:
    assert take(invoke, "train.py:make_model", "--device", "cpu").device == "CPU"


def test_an_optimizer_by_name_has_its_state_counted(invoke: Invoke) -> None:
    profile = take(invoke, "train.py:make_model", "--optimizer", "AdamW")
    assert profile.optimizer == "AdamW"
    assert held(profile, Category.OPTIMIZER) >= 2 * held(profile, Category.PARAMETER)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["train.py:make_model", "--dtype", "bf17"],
            (
                "--dtype bf17: expected one of torch's floating-point types: bf16, bfloat16, float16, float32, "
                "float64, fp16, fp32, fp64, half; did you mean 'bf16'?"
            ),
        ),
        (
            ["train.py:make_model", "--optimizer", "AdanW"],
            "--optimizer AdanW: torch.optim has no optimizer 'AdanW'; did you mean 'AdamW' or 'Adam'?",
        ),
        (
            ["train.py:make_model", "--optimizer", "nowhere:Lion"],
            "--optimizer nowhere:Lion: No module named 'nowhere'",
        ),
        (["train.py:make_model", "--optimizer", "nomod:X"], "--optimizer nomod:X: No module named 'nomod'"),
        (
            ["train.py", "--device", "cpu"],
            "--device is for functions, but train.py is a script, which runs as written",
        ),
        (
            ["train.py", "--dry"],
            "--dry is for functions, but train.py is a script, which runs as written",
        ),
        (
            ["train.py:make_model", "--", "--lr", "3"],
            (
                "train.py:make_model is a function, but only scripts take arguments after --: leave out --lr 3. "
                "For a function with parameters, recollect plan has --set"
            ),
        ),
        (
            ["train.py:make_step", "--dry"],
            "--dry needs the model itself: let train.py:make_step return (model, *inputs), or a mapping with 'model'",
        ),
        (["train.py:make_model", "--html", "-"], "--html -: a page cannot go to standard output; name a file"),
        (
            ["train.py:make_model", "--html", "x.htm"],
            "x.htm: the extension says what to write; expected .html",
        ),
        (["train.py:make_model", "--json", "no/x.json"], "no/x.json: there is no folder no"),
        (["nowhere:make", "--json", "."], ". is a folder: name a file in it"),
        (["nowhere:make", "--html", "."], ". is a folder: name a file in it"),
        (["nowhere:make", "--json", LONG], f"{LONG} cannot be written: File name too long"),
        (["train:"], "target 'train:': expected module:function, path/to/file.py:function or path/to/script.py"),
        (["tests"], "target 'tests': expected module:function, path/to/file.py:function or path/to/script.py"),
        (["trian.py"], "there is no file trian.py; did you mean 'train.py'?"),
        (["trian.py:make_model"], "there is no file trian.py; did you mean 'train.py'?"),
        (["no/train.py"], "there is no file no/train.py, nor a folder no"),
        (["train.py:make_modle"], "train.py has no 'make_modle'; did you mean 'make_model'?"),
        (
            ["train.py:zzz"],
            "train.py has no 'zzz'; it has make_model, make_mapping, make_step, STEP, run_step, train",
        ),
        (
            ["train.py:CALLS"],
            "'CALLS' of train.py is a list; expected a function that can be called without arguments",
        ),
        (
            ["train.py:train"],
            (
                "train.py:train takes arguments, (steps), and train has no 'steps': define module variables with "
                "these names, or name a function without arguments that makes the model and its inputs and either "
                "returns them or runs the step"
            ),
        ),
    ],
)
def test_wrong_usage_is_explained_with_exit_code_2(invoke: Invoke, args: list[str], message: str) -> None:
    done = invoke("profile", *args)
    assert (done.code, done.out, done.err.splitlines()[-1]) == (2, "", f"error: {message}")


TAKES = """
import torch
model, batch = torch.nn.Linear(4, 1), torch.ones(2, 4)
def train_step(model, batch):
    return model(batch).mean()
"""


def test_a_step_that_takes_arguments_is_given_the_variables_of_its_module(invoke: Invoke, folder: Path) -> None:
    (folder / "takes.py").write_text(TAKES)
    profile = take(invoke, "takes:train_step")
    assert {call.phase for call in profile.calls} == {Phase.FORWARD, Phase.BACKWARD}
    done = invoke("profile", "takes:model")
    assert "takes:model is a model, a Linear, without its inputs: name a function that returns" in done.err


def test_a_module_that_is_not_there_is_named_with_those_near(invoke: Invoke, folder: Path) -> None:
    done = invoke("profile", "trian:make_model")
    expected = f"error: no module named 'trian', neither in {folder} nor installed; did you mean 'train'?\n"
    assert (done.code, done.err) == (2, expected)


def test_a_device_that_is_not_here_is_refused_with_the_way_out(invoke: Invoke) -> None:
    done = invoke("profile", "train.py:make_model", "--device", "H200")
    assert done.code == 2
    assert done.err.startswith("error: --device H200: no step can run there: ")
    assert done.err.endswith(
        ". For a device that this machine does not have, `recollect profile` and `recollect plan` can estimate with "
        "--dry\n"
    )


def test_a_dry_profile_estimates_for_a_device_that_is_not_here_without_memory(invoke: Invoke, folder: Path) -> None:
    source = """
import torch
def make():
    model = torch.nn.Linear(2**17, 2**17)
    assert model.weight.is_meta
    return model, torch.randn(8, 2**17)
"""
    (folder / "large.py").write_text(source, "utf-8")
    profile = take(invoke, "large.py:make", "--dry", "--device", "H200", "--dtype", "bf16", "--optimizer", "SGD")
    assert (profile.is_dry, profile.device) == (True, "NVIDIA H200")
    assert held(profile, Category.PARAMETER) == 2 * (2**34 + 2**17)


def test_a_function_that_needs_values_is_called_with_memory_and_that_is_said(invoke: Invoke, folder: Path) -> None:
    source = """
import torch
def make():
    rate = torch.linspace(0, 0.1, 3)[1].item()
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(rate)), torch.randn(2, 4)
"""
    (folder / "values.py").write_text(source, "utf-8")
    done = invoke("profile", "values.py:make", "--dry", "--json", "-")
    assert Profile.from_json(done.out).is_dry
    assert done.err.startswith("values.py:make needs values, so its tensors take memory: Tensor.item() ")


def test_a_device_that_nobody_knows_is_refused_before_anything_runs(invoke: Invoke) -> None:
    done = invoke("profile", "no_such_module:make", "--dry", "--device", "abacus")
    assert done.code == 2
    assert done.err.startswith("error: --device abacus: unknown device 'abacus'; expected one of ")


# Failures of the user's code.


FAILING = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        raise KeyError("not mine")

def make():
    return Model(), torch.ones(2, requires_grad=True)

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), torch.ones(2)

def leave():
    raise SystemExit("enough")
"""


def test_an_exception_of_the_model_shows_its_frames_and_none_of_ours(invoke: Invoke, folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING, "utf-8")
    done = invoke("profile", "failing.py:make")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1] == "KeyError: 'not mine'"
    assert 'failing.py", line 10, in inner' in done.err
    assert str(Path(library.__file__).parent) not in done.err


def test_all_frames_are_shown_when_asked_for(invoke: Invoke, folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING, "utf-8")
    done = invoke("profile", "failing.py:make", "--traceback")
    assert done.code == 1
    assert str(Path(library.__file__).parent) in done.err


def test_a_step_without_gradients_is_explained_in_a_sentence(invoke: Invoke, folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING, "utf-8")
    done = invoke("profile", "failing.py:frozen")
    assert done.code == 1
    assert done.err.startswith("error: cannot make a loss from what Linear returns")
    assert "Traceback" not in done.err


def test_code_that_ends_the_process_is_said_to_have_done_so(invoke: Invoke, folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING, "utf-8")
    done = invoke("profile", "failing.py:leave")
    expected = "error: the profiled code ended the process with sys.exit('enough')\n"
    assert (done.code, done.err) == (1, expected)


@pytest.mark.parametrize("target", ["full.py:make", "full.py:run", "full.py"])
def test_a_step_that_runs_out_of_memory_says_what_was_alive(invoke: Invoke, folder: Path, target: str) -> None:
    source = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
    def forward(self, x):
        return self.body(x).new_empty(10**15)
def make():
    return Net(), torch.ones(64, 256)
def run():
    model, x = make()
    model(x).sum().backward()
if __name__ == "__main__":
    run()
"""
    (folder / "full.py").write_text(source, "utf-8")
    done = invoke("profile", target)
    assert done.code == 1
    assert "out of memory on cpu in forward of Net" in done.err
    assert "alive on cpu" in done.err
    assert "can't allocate memory" in done.err.splitlines()[-1]


@pytest.mark.parametrize("target", ["bad:make", "bad.py:make", "bad.py"])
@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("x = 1 +\n", "SyntaxError: invalid syntax"),
        ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
    ids=["syntax", "import"],
)
def test_a_file_that_does_not_load_is_the_users_failure(
    invoke: Invoke, folder: Path, source: str, last: str, target: str
) -> None:
    (folder / "bad.py").write_text(source, "utf-8")
    done = invoke("profile", target)
    assert (done.code, done.err.splitlines()[-1]) == (1, last)
    assert "importlib" not in done.err
    assert "runpy" not in done.err
    assert str(Path(library.__file__).parent) not in done.err


def test_a_failure_inside_the_library_shows_all_frames(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from recollect._cli import profiling as command

    def broken(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(command, "find_target", broken)
    done = invoke("profile", "train.py:make_model")
    assert done.code == 1
    assert "AssertionError: ours" in done.err
    assert "Traceback" in done.err


# Output.


def test_json_on_standard_output_is_alone_there(folder: Path) -> None:
    source = "import os, train\ndef loud():\n    os.system('echo from a program')\n    train.run_step()\n"
    (folder / "loud.py").write_text(source, "utf-8")
    done = recollect("profile", "loud.py:loud", "--json", "-", folder=folder)
    assert done.code == 0
    assert json.loads(done.out)["recollect"] == "profile"
    assert done.out.count("\n") == 1
    assert sorted(set(done.err.splitlines())) == ["a step of mine", "from a program"]


def test_files_are_written_and_named_on_standard_error(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path | None, int]] = []

    def report(profile: Profile, to: Path | None = None, *, against: Profile | None = None, top: int = 20) -> None:
        assert against is None
        asked.append((to, top))

    monkeypatch.setattr("recollect._cli.report.make_report", report)
    done = invoke("profile", "train.py:make_model", "--json", "x", "--html", "x.html", "--top", "3")
    assert (done.code, done.err) == (0, "wrote x\nwrote x.html\n")
    assert Profile.from_json((folder / "x").read_text("utf-8")).name == "Sequential"
    assert asked == [(None, 3), (folder / "x.html", 3)]
    assert invoke("profile", "train.py:make_model", "--json", "x", "--quiet").err == ""


@pytest.mark.parametrize("target", ["moving.py", "moving.py:make"])
def test_code_that_changes_its_folder_does_not_move_the_files(invoke: Invoke, folder: Path, target: str) -> None:
    source = """
import os, train
os.mkdir("elsewhere")
os.chdir("elsewhere")
make = train.make_model
if __name__ == "__main__":
    train.train(3)
"""
    (folder / "moving.py").write_text(source, "utf-8")
    done = invoke("profile", target, "--json", "x.json", "--html", "x.html")
    assert (done.code, done.err) == (0, "wrote x.json\nwrote x.html\n")
    assert (folder / "x.json").is_file()
    assert (folder / "x.html").is_file()
    assert list((folder / "elsewhere").iterdir()) == []


def test_a_file_that_turns_out_not_to_be_writable_does_not_take_the_others_along(invoke: Invoke, folder: Path) -> None:
    source = "import os, train\ndef make():\n    os.mkdir('x')\n    return train.make_model()\n"
    (folder / "late.py").write_text(source, "utf-8")
    done = invoke("profile", "late.py:make", "--json", "x", "--html", "x.html")
    assert (done.code, done.err) == (2, "error: x cannot be written: Is a directory\nwrote x.html\n")
    assert done.out.startswith("Sequential on CPU: peak")
    assert (folder / "x.html").is_file()


@pytest.mark.parametrize("there", [True, False], ids=["the file", "its folder"])
def test_a_place_that_may_not_be_written_is_refused_before_anything_runs(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    if there:
        (folder / "x.json").touch()
    needed = Path("x.json" if there else ".")
    monkeypatch.setattr("os.access", lambda path, mode: (path, mode) != (needed, os.W_OK))
    done = invoke("profile", "nowhere:make", "--json", "x.json")
    expected = f"error: x.json cannot be written: no permission to write to {needed}\n"
    assert (done.code, done.err) == (2, expected)


def test_the_text_report_is_printed_without_escape_codes_where_it_is_piped(invoke: Invoke) -> None:
    done = invoke("profile", "train.py:make_model")
    assert (done.code, done.err) == (0, "")
    assert "peak" in done.out
    assert "\x1b" not in done.out
