"""Compiling contenders ahead, in processes of their own: who measures finds their code in the compiler's cache.

A compiler works on one core for most of its time, so that several contenders compile in the time of one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import torch

from recollect._bench.arena import Arena
from recollect._bench.cases import SCALES
from recollect._bench.children import end_with_parent
from recollect._bench.contenders import Contender, list_contenders
from recollect._bench.failures import find_refusal
from recollect._bench.ours import HOST_SHARES, list_compiled
from recollect._core.torch_private.recompiles import allow_compilations

MOST_COMPILATIONS = 64
"""Of a model's code: each contender has a version of it."""
_MEMORY_SHARE = 0.6
"""Of a device, for all processes that compile. One that needs more for its step fails, but has compiled it by then."""
_REFUSED = "refused: "
"""Before what a process says last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrants:
    """Who is compiled, and for what.

    Attributes:
        model: its name.
        size: ``"small"`` or ``"large"``.
        device: as torch writes it.
        shares: that ours is given, in percent.
        span_bytes: what the plain compiled step takes beyond what is there before it. Without it ours has no budgets,
            and only the rivals are known.
    """

    model: str
    size: str
    device: str
    shares: tuple[int, ...]
    span_bytes: int | None = None

    def make_arena(self) -> Arena:
        """The model that they share."""
        return Arena(SCALES[torch.device(self.device).type, self.model, self.size].case(), self.device)

    def list_contenders(self, arena: Arena) -> list[Contender]:
        """All that are compiled for an arena."""
        ours: list[Contender] = []
        if self.span_bytes is not None:
            ours = list_compiled(arena.model_bytes, self.span_bytes, self.shares)
            if arena.device.type != "cpu":
                ours += list_compiled(arena.model_bytes, self.span_bytes, HOST_SHARES, tiers="host")
        return list_contenders(ours, arena.device, is_compiled=True)


class Ahead:
    """Compiles contenders, each in a process, some at a time. Nothing runs any more when it is left.

    What fails there fails again where it is measured, but for budgets that are refused: to find that out takes as long
    as to compile.

    Args:
        jobs: how many processes at a time, which share a part of the device's memory; 0 for none at all.
        end: when they are stopped, by the clock of `time.monotonic`.
    """

    def __init__(self, *, jobs: int, end: float) -> None:
        self._end, self._jobs = end, jobs
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="recollect-bench-ahead") if jobs else None
        self._refused: dict[str, Future[str]] = {}
        self._processes: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
            for process in self._processes:
                process.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def is_busy(self) -> bool:
        """Whether processes are running."""
        return bool(self._processes)

    def begin(self, entrants: Entrants, names: Iterable[str]) -> None:
        """Have contenders compiled, unless they are already, in this order."""
        if self._pool is None:
            return
        for name in names:
            if name not in self._refused:
                how = {"name": name, "memory_share": _MEMORY_SHARE / self._jobs}
                asked = json.dumps({**dataclasses.asdict(entrants), **how})
                self._refused[name] = self._pool.submit(self._compile, asked)

    def wait_for_one(self, names: Sequence[str]) -> str:
        """Wait until one of these need not be waited for, and name it; of several the first."""
        if all(name in self._refused for name in names):
            wait([self._refused[name] for name in names], return_when=FIRST_COMPLETED)
        return next(name for name in names if name not in self._refused or self._refused[name].done())

    def wait(self) -> None:
        """Wait until all are compiled."""
        wait(self._refused.values())

    def find_refusal(self, name: str) -> str:
        """Why a contender that was waited for has no plan; ``""`` if it has one, or was not compiled."""
        return self._refused[name].result() if name in self._refused else ""

    def _compile(self, asked: str) -> str:
        command = [sys.executable, "-m", "recollect._bench.ahead", asked]
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        with self._lock:
            if self._is_over or time.monotonic() > self._end:
                return ""
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._processes.add(process)
        try:
            said, _ = process.communicate(
                None, None if self._end == math.inf else max(0.0, self._end - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        finally:
            with self._lock:
                self._processes.discard(process)
        return said.strip().rpartition("\n")[2].partition(_REFUSED)[2]


def main(arguments: list[str]) -> None:
    """What such a process does."""
    end_with_parent()
    said = json.loads(arguments[0])
    name, memory_share = said.pop("name"), said.pop("memory_share")
    entrants = Entrants(**{**said, "shares": tuple(said["shares"])})
    torch.set_num_threads(1)
    if torch.device(entrants.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory_share)
    arena = entrants.make_arena()
    with allow_compilations(MOST_COMPILATIONS):
        for one in entrants.list_contenders(arena):
            if one.name == name:
                try:
                    arena.prepare(one, is_compiled=True)
                except Exception as error:  # shown where it is measured
                    sys.stdout.write(f"\n{_REFUSED}{find_refusal(error)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
