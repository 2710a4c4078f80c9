"""Compiled contenders: each has code of its own, may be compiled ahead, and leaves no process behind."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from recollect._bench import ahead
from recollect._bench.ahead import Ahead, Entrants
from recollect._bench.arena import Arena
from recollect._bench.contenders import COMPILER_SHARES, PLAIN, Contender
from recollect._core.errors import BudgetError
from tests.bench.test_cell import TINY

pytest.importorskip("scipy")

FIELD = Entrants(model="Llama", size="small", device="cpu", span_bytes=2**20, shares=(50,))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SCALES", {("cpu", "Llama", "small"): TINY})


def test_contenders_that_differ_only_in_the_compilers_settings_have_code_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    arena = FIELD.make_arena()
    torch._dynamo.reset()
    counters.clear()
    chosen = [one for one in FIELD.list_contenders(arena) if one.name == PLAIN or "activation_memory" in one.name]
    assert len(chosen) == 1 + len(COMPILER_SHARES)
    norms = [arena.prepare(one, is_compiled=True).norms for one in chosen]
    assert counters["stats"]["unique_graphs"] == len(chosen)
    assert all(one == norms[0] for one in norms)


def test_without_the_plain_steps_peak_only_rivals_are_known() -> None:
    names = {one.name for one in replace(FIELD, span_bytes=None).list_contenders(FIELD.make_arena())}
    assert "torch full" in names
    assert not any(name.startswith("recollect") for name in names)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("out of something"), ""),
        (BudgetError("no plan", smallest_bytes=2**30), "no plan: the smallest peak of the graph is 1.00 GiB"),
    ],
)
def test_a_process_compiles_the_one_it_is_asked_for_and_says_whether_its_budget_was_refused(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def prepare(self: Arena, one: Contender, *, is_compiled: bool) -> Any:
        assert is_compiled
        asked.append(one.name)
        raise error

    monkeypatch.setattr(Arena, "prepare", prepare)
    monkeypatch.setattr(ahead, "end_with_parent", lambda: None)
    ahead.main([json.dumps({**asdict(FIELD), "name": "recollect 50%", "memory_share": 0.5})])
    assert asked == ["recollect 50%"]
    assert capsys.readouterr().out == f"\nrefused: {said}\n"


class Processes:
    """Stands in for processes: each runs until it is told to end, or killed, and then says something."""

    def __init__(self) -> None:
        self.says = ""
        self.started: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.killed: list[str] = []
        self.most_at_once = 0

    def __call__(self, command: list[str], **_: Any) -> Processes.One:
        name = json.loads(command[-1])["name"]
        self.ends[name] = threading.Event()
        self.started.append(name)
        self.most_at_once = max(self.most_at_once, sum(not end.is_set() for end in self.ends.values()))
        return Processes.One(self, name)

    class One:
        def __init__(self, all_of_them: Processes, name: str) -> None:
            self.all, self.name = all_of_them, name

        def communicate(self, _given: None = None, timeout: float | None = None) -> tuple[str, None]:
            if not self.all.ends[self.name].wait(timeout):
                raise subprocess.TimeoutExpired(self.name, timeout or 0)
            return self.all.says, None

        def kill(self) -> None:
            self.all.killed.append(self.name)
            self.all.ends[self.name].set()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    found = Processes()
    monkeypatch.setattr(subprocess, "Popen", found)
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 180  # only so that a test that fails does not hang
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_so_many_contenders_are_compiled_at_a_time_and_each_once(processes: Processes) -> None:
    with Ahead(jobs=2, end=math.inf) as compiling:
        compiling.begin(FIELD, ["a", "b", "c"])
        compiling.begin(FIELD, ["a", "d"])
        wait_until(lambda: len(processes.started) == 2)
        assert compiling.is_busy
        for name in "abcd":
            wait_until(functools.partial(processes.ends.__contains__, name))
            processes.ends[name].set()
            assert compiling.wait_for_one([name]) == name
            assert not compiling.find_refusal(name)
        compiling.wait()
        assert not compiling.is_busy
    assert sorted(processes.started) == ["a", "b", "c", "d"]
    assert processes.most_at_once == 2
    assert not processes.killed


def test_nothing_compiles_any_more_when_it_is_left(processes: Processes) -> None:
    with Ahead(jobs=1, end=math.inf) as compiling:
        compiling.begin(FIELD, ["a", "b"])
        wait_until(lambda: bool(processes.started))
    assert processes.started == processes.killed == ["a"]


def test_processes_are_stopped_when_the_time_is_up(processes: Processes) -> None:
    with Ahead(jobs=1, end=time.monotonic() + 0.01) as compiling:
        compiling.begin(FIELD, ["a", "b"])
        compiling.wait()
    assert processes.started in (processes.killed, [])
    assert "b" not in processes.started


def test_without_jobs_nothing_is_compiled_ahead(processes: Processes) -> None:
    with Ahead(jobs=0, end=math.inf) as compiling:
        compiling.begin(FIELD, ["a"])
        assert compiling.wait_for_one(["a"]) == "a"
        assert not compiling.find_refusal("a")
    assert not processes.started


def test_who_is_compiled_first_is_not_held_up_by_the_others(processes: Processes) -> None:
    with Ahead(jobs=2, end=math.inf) as compiling:
        compiling.begin(FIELD, ["a", "b"])
        wait_until(lambda: len(processes.started) == 2)
        assert compiling.wait_for_one(["a", "nobody compiles it", "b"]) == "nobody compiles it"
        processes.ends["b"].set()
        assert compiling.wait_for_one(["a", "b"]) == "b"
        processes.ends["a"].set()
        compiling.wait()
        assert compiling.wait_for_one(["a", "b"]) == "a"


def test_a_refused_budget_is_known_from_the_process_that_compiled_it(processes: Processes) -> None:
    processes.says = "something else\n\nrefused: no plan: as small as can be\n"
    with Ahead(jobs=1, end=math.inf) as compiling:
        compiling.begin(FIELD, ["a"])
        wait_until(lambda: "a" in processes.ends)
        processes.ends["a"].set()
        compiling.wait()
        assert compiling.find_refusal("a") == "no plan: as small as can be"


CHILD = """
import time
from recollect._bench.children import end_with_parent
end_with_parent()
print("up", flush=True)
time.sleep(60)
print("still there")
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


def test_a_process_ends_with_the_one_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == ""  # which the child holds open for as long as it runs
