"""A step of a script: which one is profiled, where it begins and ends, and how the script is stopped."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recollect._cli import script
from recollect._core.calls import Category, Phase
from recollect._core.profiles import Profile
from recollect._inspect.step import StepProfiler
from tests.cli.conftest import Invoke
from tests.cli.taking import held

pytest.importorskip("typer")

FUNCTIONAL = """
import torch
w = torch.ones(4, 4, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
for number in range(5):
    print("step", number)
    optimizer.zero_grad()
    (torch.ones(2, 4) @ w).sum().backward()
    optimizer.step()
"""


def steps_of(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("step")]


def test_a_script_has_its_second_step_profiled_and_is_stopped_then(invoke: Invoke) -> None:
    done = invoke("profile", "train.py", "--json", "-", "--", "9")
    profile = Profile.from_json(done.out)
    assert steps_of(done.err) == ["step 0", "step 1"]
    assert (profile.name, profile.optimizer) == ("train.py", "SGD")
    assert {call.phase for call in profile.calls} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert held(profile, Category.OPTIMIZER) == held(profile, Category.PARAMETER)
    assert [module.path for module in profile.modules] == ["", "0", "1", "2"]


def test_another_step_of_a_script_can_be_asked_for(invoke: Invoke) -> None:
    done = invoke("profile", "train.py", "--json", "-", "--step", "1", "--", "1")
    assert done.code == 0, done.err
    assert Profile.from_json(done.out).optimizer == "SGD"


def test_a_script_that_ends_too_early_says_how_far_it_came(invoke: Invoke) -> None:
    done = invoke("profile", "train.py", "--", "1")
    assert done.code == 1
    assert done.err == (
        "error: train.py ended after 1 optimizer step, before step 2, which was to be profiled: pass `--step 1`, or "
        "let it run longer\n"
    )


def test_a_script_without_steps_says_so(invoke: Invoke) -> None:
    done = invoke("profile", "train.py", "--", "0")
    assert done.code == 1
    assert done.err == (
        "error: train.py ended without an optimizer step, so there is nothing to profile: name a function that runs "
        "a step, train.py:function\n"
    )


def test_what_a_script_does_while_it_is_stopped_does_no_harm(invoke: Invoke, folder: Path) -> None:
    (folder / "guarded.py").write_text("import train\ntry:\n  train.train(5)\nfinally:\n  raise KeyError\n", "utf-8")
    done = invoke("profile", "guarded.py", "--json", "-")
    assert done.code == 0, done.err


def test_a_profiled_script_leaves_no_hook_behind(invoke: Invoke, folder: Path) -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer

    (folder / "broken.py").write_text("import train\ntrain.train(1)\ntrain.make_model()[0](1)\n", "utf-8")
    before = (len(module._global_forward_pre_hooks), len(optimizer._global_optimizer_post_hooks))
    assert invoke("profile", "train.py", "--json", "-", "--", "3").code == 0
    assert invoke("profile", "broken.py", "--json", "-").code == 1
    assert (len(module._global_forward_pre_hooks), len(optimizer._global_optimizer_post_hooks)) == before


# Where a step begins.


def test_a_script_that_calls_no_module_has_its_second_step_profiled(invoke: Invoke, folder: Path) -> None:
    (folder / "functional.py").write_text(FUNCTIONAL, "utf-8")
    done = invoke("profile", "functional.py", "--json", "-")
    assert done.code == 0, done.err
    profile = Profile.from_json(done.out)
    assert steps_of(done.err) == ["step 0", "step 1"]
    assert profile.optimizer == "SGD"
    assert [call.op for call in profile.calls].count("aten.mm.default") == 2
    assert {call.phase for call in profile.calls} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert held(profile, Category.OPTIMIZER) == 64


def test_a_later_step_of_a_script_without_modules_can_be_asked_for(invoke: Invoke, folder: Path) -> None:
    (folder / "functional.py").write_text(FUNCTIONAL, "utf-8")
    done = invoke("profile", "functional.py", "--json", "-", "--step", "4")
    assert done.code == 0, done.err
    assert steps_of(done.err) == ["step 0", "step 1", "step 2", "step 3"]
    assert [call.op for call in Profile.from_json(done.out).calls].count("aten.mm.default") == 2


def test_the_first_step_of_a_script_without_modules_has_no_beginning_and_that_is_said(
    invoke: Invoke, folder: Path
) -> None:
    (folder / "functional.py").write_text(FUNCTIONAL, "utf-8")
    done = invoke("profile", "functional.py", "--step", "1")
    assert done.code == 1
    assert done.err == (
        "error: functional.py called no torch.nn.Module in step 1, but a step begins where one is first "
        "called: pass `--step 2`, or name a function that runs a step, functional.py:function\n"
    )


# How a script is stopped.


def test_a_script_that_catches_everything_has_one_step_profiled_once(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[StepProfiler] = []
    leave = StepProfiler.__exit__

    def count(profiler: StepProfiler, *error: Any) -> None:
        left.append(profiler)
        leave(profiler, *error)

    monkeypatch.setattr(StepProfiler, "__exit__", count)
    source = """
import train
for number in range(5):
    try:
        train.STEP()
    except BaseException as error:
        print("caught", number)
"""
    (folder / "stubborn.py").write_text(source, "utf-8")
    done = invoke("profile", "stubborn.py", "--json", "-")
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if "caught" in line] == [
        f"caught {number}" for number in (1, 2, 3, 4)
    ]
    assert len(left) == 1
    profile = Profile.from_json(done.out)
    assert [call.op for call in profile.calls].count("aten.mean.default") == 1
    assert {call.phase for call in profile.calls} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


@pytest.mark.parametrize("ending", ["thread.join()", ""], ids=["joined", "left to Python"])
def test_a_script_that_trains_in_a_thread_is_stopped_without_a_traceback(
    invoke: Invoke, folder: Path, ending: str
) -> None:
    source = (
        f"import threading, train\nthread = threading.Thread(target=train.train, args=(5,))\nthread.start()\n{ending}"
    )
    (folder / "threaded.py").write_text(source, "utf-8")
    before = threading.excepthook
    done = invoke("profile", "threaded.py", "--json", "-")
    assert done.code == 0, done.err
    assert steps_of(done.err) == ["step 0", "step 1"]
    assert "Traceback" not in done.err
    assert threading.excepthook is before
    assert {call.phase for call in Profile.from_json(done.out).calls} == {
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
    }


def test_a_thread_that_is_slow_to_stop_shows_no_traceback_either(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowlyTakenError(script._StepTakenError):
        def __init__(self) -> None:
            time.sleep(0.2)  # the profile is there, and the main thread may go on

    monkeypatch.setattr(script, "_StepTakenError", SlowlyTakenError)
    source = "import threading, train\nthreading.Thread(target=train.train, args=(5,), name='training').start()"
    (folder / "threaded.py").write_text(source, "utf-8")
    done = invoke("profile", "threaded.py", "--json", "-")
    assert "training" not in {thread.name for thread in threading.enumerate()}, "it would show its end"
    assert (done.code, steps_of(done.err)) == (0, ["step 0", "step 1"])
    assert "Traceback" not in done.err


def test_a_module_that_another_thread_calls_begins_no_step(invoke: Invoke, folder: Path) -> None:
    source = """
import threading, train
model, x = train.make_model()
for number in range(3):
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    thread.join()
    train.STEP()
"""
    (folder / "watched.py").write_text(source, "utf-8")
    done = invoke("profile", "watched.py", "--json", "-")
    assert done.code == 0, done.err
    calls = Profile.from_json(done.out).calls
    assert [call.op for call in calls].count("aten.gelu.default") == 1
