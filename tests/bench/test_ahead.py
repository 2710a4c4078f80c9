"""Compiled contenders: each has code of its own, may be compiled ahead, and leaves no process behind."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from recollect._bench import ahead
from recollect._bench.ahead import Entrants, compile_ahead
from recollect._bench.arena import Arena
from recollect._bench.contenders import COMPILER_SHARES, PLAIN, Contender
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


def test_a_process_compiles_those_it_is_asked_for_and_goes_on_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def prepare(self: Arena, one: Contender, *, is_compiled: bool) -> Any:
        assert is_compiled
        asked.append(one.name)
        raise RuntimeError("out of something")

    monkeypatch.setattr(Arena, "prepare", prepare)
    monkeypatch.setattr(ahead, "end_with_parent", lambda: None)
    ahead.main([json.dumps({**asdict(FIELD), "names": ["recollect 50%", "torch full"]})])
    assert asked == ["recollect 50%", "torch full"]


def test_the_contenders_are_dealt_out_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(json.loads(command[-1])["names"])

        def wait(self, _timeout: float | None = None) -> None:
            pass

        def kill(self) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Process)
    compile_ahead(FIELD, ["a", "b", "c", "d", "e"], jobs=2, end=time.monotonic() + 60)
    assert started == [["a", "c", "e"], ["b", "d"]]
    compile_ahead(FIELD, ["a"], jobs=0, end=time.monotonic() + 60)
    assert len(started) == 2


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
