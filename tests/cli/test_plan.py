"""`recollect plan` and `recollect fit`: what they take, print and write, and how failures are told apart."""

import re
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import recollect as library
from recollect._core.plans import Plan
from recollect._fit import work
from recollect._profile.links import Link
from tests.cli.conftest import Invoke

pytest.importorskip("typer")
pytest.importorskip("scipy")

BLOCKS = """
from collections import UserDict
import torch
from torch import nn

def make_model():
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(512, 64)

def make_mapping():
    model, x = make_model()
    return {"model": model, "inputs": {"input": x}, "loss": lambda y: y.square().mean(), "optimizer": torch.optim.AdamW}

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, _ = make_model()
    def forward(self, hidden, scale=1.0):
        return self.blocks(hidden) * scale

def make_batch():
    return Named(), {"hidden": torch.randn(512, 64)}

def make_batch_of_another_class():
    model, batch = make_batch()
    return model, UserDict(batch)

def make_step():
    model, x = make_model()
    def step():
        model(x).mean().backward()
    return step

def no_module():
    weight = torch.randn(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()

def make_sized(batch=64, length=8):
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(batch, length, 64)

def needs_size(batch):
    return make_sized(batch)

def broken():
    raise RuntimeError("mine")
"""

WORDS = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)))
        self.head = nn.Linear(16, 2048)

    def forward(self, x, targets):
        return nn.functional.cross_entropy(self.head(self.blocks(x)), targets)

def make_model():
    return Words(), torch.randn(128, 16), torch.randint(2048, (128,))
"""


@pytest.fixture(autouse=True)
def blocks(folder: Path) -> None:
    (folder / "blocks.py").write_text(BLOCKS, "utf-8")


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize("target", ["blocks:make_model", "blocks.py:make_mapping", "blocks.py:make_step"])
def test_a_target_is_planned_and_written(invoke: Invoke, folder: Path, command: str, target: str) -> None:
    done = invoke(command, target, "--budget", "5MiB")
    assert done.code == 0, done.err
    assert re.search(r"^plan .* within .*regions?$", done.out, re.MULTILINE)
    assert "budget 5MiB" in done.out
    assert command == "plan" or done.out.partition(":")[0].endswith(" within 5MiB")  # tightened or not
    assert ("measured peak" in done.out) is (command == "fit")
    assert done.err.splitlines()[:2] == ["wrote plan.json", "wrote plan.html"]
    made = Plan.from_json((folder / "plan.json").read_text("utf-8"))
    assert made.peak_bytes <= 5 * 2**20
    assert "<title>" in (folder / "plan.html").read_text("utf-8")


@pytest.mark.parametrize("target", ["blocks:make_batch", "blocks:make_batch_of_another_class"])
@pytest.mark.parametrize("command", ["profile", "plan", "fit"])
def test_a_batch_that_maps_names_is_spread_over_the_models_arguments(invoke: Invoke, command: str, target: str) -> None:
    budget = () if command == "profile" else ("--budget", "8MiB")
    done = invoke(command, target, *budget, "--dtype", "float64")
    assert not done.code, done.err
    assert "Named" in done.out


def test_what_was_written_can_be_applied_as_the_command_says(invoke: Invoke, folder: Path) -> None:
    done = invoke("plan", "blocks:make_model", "--budget", "min")
    code = next(line for line in done.err.splitlines() if line.startswith("to use it: ")).removeprefix("to use it: ")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    assert code.startswith("recollect.apply(model, recollect.Plan.from_json(")
    applied = library.apply(model, Plan.from_json((folder / "plan.json").read_text("utf-8")))
    model(torch.randn(512, 64)).sum().backward()
    applied.remove()


def test_a_budget_without_a_unit_is_in_bytes(invoke: Invoke) -> None:
    invoke("profile", "blocks:make_model", "--json", "step.json", "--quiet")
    done = invoke("plan", "step.json", "--budget", str(5 * 2**20), "--quiet")
    assert "budget 5.00 MiB" in done.out


def test_a_profile_that_was_written_is_planned_without_running_anything(invoke: Invoke) -> None:
    assert invoke("profile", "blocks:make_model", "--json", "step.json", "--quiet").code == 0
    done = invoke("plan", "step.json", "--budget", "min", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert "budget min" in done.out


def test_how_to_take_a_profile_means_nothing_for_one_that_is_there(invoke: Invoke) -> None:
    invoke("profile", "blocks:make_model", "--json", "step.json", "--quiet")
    done = invoke("plan", "step.json", "--budget", "min", "--dry")
    assert done.code == 2
    assert "--dry would change how a profile is taken, but step.json is already a profile" in done.err


def test_the_plan_alone_goes_to_standard_output_if_asked(invoke: Invoke, folder: Path) -> None:
    done = invoke("plan", "blocks:make_model", "--budget", "min", "--out", "-", "--html", "all.html", "--quiet")
    assert Plan.from_json(done.out).peak_bytes > 0
    assert not (folder / "plan.json").exists()
    assert (folder / "all.html").exists()


def test_a_dry_plan_is_for_a_device_that_is_not_here(invoke: Invoke) -> None:
    done = invoke("plan", "blocks:make_model", "--dry", "--device", "H100", "--budget", "90%")
    assert done.code == 0, done.err
    assert "budget 90% (71.19 GiB)" in done.out


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_budget_that_nothing_fits_is_explained_without_a_traceback(invoke: Invoke, command: str) -> None:
    done = invoke(command, "blocks:make_model", "--budget", "1KiB")
    assert done.code == 1
    assert "no plan fits 1.00 KiB" in done.err
    assert "the smallest reachable peak is" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_refusal_names_options_as_they_are_typed(invoke: Invoke, folder: Path, command: str) -> None:
    (folder / "words.py").write_text(WORDS, "utf-8")
    done = invoke(command, "words:make_model", "--budget", "1MiB")
    assert done.code == 1
    assert "let `recollect fit` compute the loss in chunks (`--lever chunked_loss`), shrink the batch" in done.err
    assert ("Also possible here: --lever chunked_loss --lever micro_batches" in done.err) is (command == "fit")
    other = invoke(command, "words:make_model", "--budget", "1MiB", "--tiers", "host")
    assert "--tiers host: the step already runs in host memory, so moving values there frees nothing" in other.err
    assert "Write --tiers disk, or leave --tiers out" in other.err
    for text in (done.err, other.err):
        assert "levers=" not in text
        assert "tiers=" not in text


def test_a_lever_that_cannot_be_used_is_named_as_it_is_typed(invoke: Invoke) -> None:
    done = invoke("fit", "blocks.py:make_step", "--budget", "1MiB", "--lever", "micro_batches")
    assert done.code == 1
    assert "--lever micro_batches works only if recollect.fit runs forward and backward itself: let the function" in (
        done.err
    )


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_share_of_the_host_is_refused_with_what_to_type(invoke: Invoke, command: str) -> None:
    done = invoke(command, "blocks.py:make_model", "--budget", "50%")
    assert done.code == 1
    assert done.err.endswith("Give bytes, as in '40GiB', or profile for a GPU: recollect plan --dry --device H100\n")


def test_sizes_are_not_looked_for_in_a_profile(invoke: Invoke) -> None:
    done = invoke("plan", "step.json", "--budget", "1GiB", "--unknown", "batch")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "error: --unknown batch: step.json is a profile, whose sizes are fixed: name the function"
    )


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_values_may_be_moved_to_disk(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    asked = []

    def measure_disk() -> list[Link]:
        asked.append("disk")
        return [Link(name="to disk", bytes_per_s=1e9)]

    monkeypatch.setattr(work, "measure_disk", measure_disk)
    done = invoke(command, "blocks.py:make_model", "--budget", "3.5MiB", "--tiers", "disk", "--quiet")
    assert done.code == 0, done.err
    assert asked == ["disk"]
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.forecast is not None
    assert plan.forecast.peak_bytes <= 3.5 * 2**20


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_disk_that_cannot_be_written_is_refused(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    done = invoke(command, "blocks.py:make_model", "--budget", "3.5MiB", "--tiers", "disk", "--quiet")
    assert done.code == 1
    assert done.err == (
        "error: --tiers disk: no file can be written among the temporary files, where values would go: No such file or "
        "directory.\nSet TMPDIR to a folder that can be written and has room.\n"
    )
    with pytest.raises(library.OffloadError, match=r"^tiers='disk': no file can be written among the temporary files"):
        library.plan(library.profile(nn.Linear(8, 8), torch.ones(2, 8)), budget="min", tiers="disk")


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "lots"), "--budget: budget 'lots': expected bytes as a whole number"),
        (("--budget", "min", "--tiers", "moon"), "--tiers moon: expected host, disk, or host,disk\n"),
        (
            ("--budget", "min", "--tiers", "host, disc"),
            "--tiers host,disc: expected host, disk, or host,disk; did you mean 'disk'?",
        ),
        (("--budget", "min", "--tiers", "disk,host"), "--tiers disk,host: expected host, disk, or host,disk\n"),
        (("--budget", "min", "--out", "plan.txt"), "plan.txt: the extension says what to write"),
        (("--budget", "min", "--html", "-"), "--html -: a page cannot go to standard output"),
    ],
)
def test_wrong_usage_is_refused_before_the_work(
    invoke: Invoke, command: str, options: tuple[str, ...], message: str
) -> None:
    done = invoke(command, "blocks:broken", *options)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_failure_of_the_target_shows_its_own_frames(invoke: Invoke, command: str) -> None:
    done = invoke(command, "blocks:broken", "--budget", "min")
    assert done.code == 1
    assert done.err.splitlines()[-1] == "RuntimeError: mine"
    assert str(Path(library.__file__).parent) not in done.err


def test_a_budget_as_a_share_of_an_unknown_device_is_explained(invoke: Invoke) -> None:
    done = invoke("plan", "blocks:make_model", "--budget", "80%")
    assert done.code == 1
    assert "a share needs to know how much memory the device has, and the profile does not say" in done.err


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_budget_without_its_unit_is_refused_before_anything_runs(invoke: Invoke, command: str) -> None:
    done = invoke(command, "blocks:make_model", "--budget", "40")
    assert done.code == 2
    assert "--budget 40 means 40 bytes, which no step can run in: to say GiB, write 40GiB" in done.err


def test_fit_runs_steps_of_its_own_and_takes_no_script(invoke: Invoke) -> None:
    done = invoke("fit", "train.py", "--budget", "min")
    assert done.code == 2
    assert "train.py is a script, but fit has to run steps itself" in done.err


def test_a_lever_is_used_where_the_budget_needs_it(invoke: Invoke) -> None:
    done = invoke("fit", "blocks:make_model", "--budget", "2.5MiB", "--lever", "micro_batches", "--quiet")
    assert done.code == 0, done.err
    assert "lever micro_batches:" in done.out
    done = invoke("fit", "blocks:make_model", "--budget", "2.5MiB", "--lever", "prayer")
    assert done.code == 2
    done_both = invoke("fit", "blocks:make_model", "--budget", "1MiB", "--lever", "chunked_loss,micro_batches")
    assert done_both.err.endswith("expected chunked_loss, chunked_mlp, micro_batches; for several, repeat --lever\n")
    assert "--lever prayer: expected chunked_loss, chunked_mlp, micro_batches\n" in done.err
    done = invoke("fit", "blocks:make_model", "--budget", "2.5MiB", "--lever", "micro_batch")
    assert "--lever micro_batch: expected chunked_loss, chunked_mlp, micro_batches; did you mean 'micro_batches'?" in (
        done.err
    )


def test_fit_needs_a_module(invoke: Invoke) -> None:
    done = invoke("fit", "blocks:no_module", "--budget", "1MiB")
    assert done.code == 2
    assert "called no torch.nn.Module" in done.err


def test_a_script_is_planned_as_it_runs(invoke: Invoke) -> None:
    done = invoke("plan", "train.py", "--budget", "min", "--quiet", "--", "4")
    assert done.code == 0, done.err
    assert "plan train.py at the smallest peak" in done.out


# Machines that are not here.


def test_the_largest_size_is_said_for_each_device_and_its_plan_written(invoke: Invoke, folder: Path) -> None:
    sized = ("blocks:make_sized", "--device", "L4,H100", "--budget", "100MiB", "--unknown", "batch")
    done = invoke("plan", *sized, "--multiple-of", "64", "--set", "length=16")
    assert done.code == 0, done.err
    assert "NVIDIA L4: largest batch within 100.00 MiB, with length 16" in done.out
    assert "NVIDIA H100 80GB HBM3: largest batch within 100.00 MiB, with length 16" in done.out
    found = {
        way: int(size.replace(",", ""))
        for way, size in re.findall(r"^ +(plain|plan) +([\d,]+) ", done.out, re.MULTILINE)
    }
    assert 0 < found["plain"] < found["plan"]
    assert found["plan"] % 64 == 0
    assert Plan.from_json((folder / "plan.json").read_text("utf-8")).peak_bytes <= 100 * 2**20


def test_a_size_that_is_needed_is_given(invoke: Invoke) -> None:
    done = invoke("plan", "blocks:needs_size", "--dry", "--device", "H100", "--budget", "min", "--set", "batch=8", "-q")
    assert done.code == 0, done.err


def test_a_world_divides_the_state(invoke: Invoke) -> None:
    def peak(*more: str) -> int:
        done = invoke("plan", "blocks:make_model", "--device", "H100", "--budget", "fastest", "--out", "-", *more)
        assert done.code == 0, done.err
        return Plan.from_json(done.out).peak_bytes

    assert peak("--world", "8", "--optimizer", "AdamW") < peak("--dry", "--optimizer", "AdamW")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--unknown", "width"), 2, "has no parameter 'width'; it takes batch, length"),
        (("--unknown", "lenght"), 2, "has no parameter 'lenght'; it takes batch, length; did you mean 'length'?"),
        (
            ("--unknown", "batch", "--set", "batch=8"),
            2,
            "--unknown batch: --set already gives it the value 8; leave one",
        ),
        (("--dry", "--device", "H100,H200"), 2, "--device H100,H200: expected one device; several are for `recollect"),
        (("--set", "batch:8"), 2, "--set batch:8: expected NAME=N, as in --set batch=8"),
        (("--set", "width=8", "--dry"), 2, "has no parameter 'width'; it takes batch, length"),
        (("--shard", "zero3"), 2, "--shard zero3: expected fsdp2"),
        (("--unknown", "batch", "--device", "H100", "--set", "length=1000000"), 1, "nothing fits: not even batch 1"),
        (("--unknown", "batch", "--device", "H100000"), 2, "--device H100000"),
    ],
)
def test_what_cannot_be_found_out_is_explained(
    invoke: Invoke, options: tuple[str, ...], code: int, message: str
) -> None:
    done = invoke("plan", "blocks:make_sized", "--budget", "100MiB", *options)
    assert (done.code, message in done.err) == (code, True), done.err


def test_an_unknown_needs_a_budget_in_bytes_and_a_function(invoke: Invoke) -> None:
    done = invoke("plan", "blocks:make_sized", "--device", "H100", "--budget", "min", "--unknown", "batch")
    assert done.code == 2
    assert "--budget min: to find the largest batch, give a number of bytes or a share" in done.err
    done = invoke("plan", "train.py", "--budget", "1GiB", "--unknown", "batch")
    assert done.code == 2
    assert "--unknown names a parameter of a function, but train.py is a script" in done.err
