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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from recollect._bench.arena import Arena
from recollect._bench.cases import SCALES
from recollect._bench.children import end_with_parent
from recollect._bench.contenders import Contender, list_contenders
from recollect._bench.ours import HOST_SHARES, list_compiled
from recollect._core.torch_private.recompiles import allow_compilations

MOST_COMPILATIONS = 64
"""Of a model's code: each contender has a version of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrants:
    """Who is compiled, and for what.

    Attributes:
        model: its name.
        size: ``"small"`` or ``"large"``.
        device: as torch writes it.
        span_bytes: what the plain compiled step takes beyond what is there before it.
        shares: that ours is given, in percent.
    """

    model: str
    size: str
    device: str
    span_bytes: int
    shares: tuple[int, ...]

    def make_arena(self) -> Arena:
        """The model that they share."""
        return Arena(SCALES[torch.device(self.device).type, self.model, self.size].case(), self.device)

    def list_contenders(self, arena: Arena) -> list[Contender]:
        """All that are compiled for an arena."""
        ours = list_compiled(arena.model_bytes, self.span_bytes, self.shares)
        if arena.device.type != "cpu":
            ours += list_compiled(arena.model_bytes, self.span_bytes, HOST_SHARES, tiers="host")
        return list_contenders(ours, arena.device, is_compiled=True)


def compile_ahead(field: Entrants, names: Sequence[str], *, jobs: int, end: float) -> None:
    """Compile contenders in processes, and wait for all of them; what fails, fails again where it is measured.

    Args:
        field: who takes part.
        names: whom to compile.
        jobs: how many processes; each takes as much of the device as one step.
        end: when they are stopped, by the clock of `time.monotonic`.
    """
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    asked = [json.dumps({**dataclasses.asdict(field), "names": names[job::jobs]}) for job in range(jobs)]
    command = [sys.executable, "-m", "recollect._bench.ahead"]
    started = [
        subprocess.Popen([*command, text], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for text in asked
    ]
    try:
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(None if end == math.inf else max(0.0, end - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.wait()


def main(arguments: list[str]) -> None:
    """What such a process does."""
    end_with_parent()
    said = json.loads(arguments[0])
    names = said.pop("names")
    field = Entrants(**{**said, "shares": tuple(said["shares"])})
    torch.set_num_threads(1)
    arena = field.make_arena()
    with allow_compilations(MOST_COMPILATIONS):
        for one in field.list_contenders(arena):
            if one.name in names:
                with suppress(Exception):  # shown where it is measured
                    arena.prepare(one, is_compiled=True)
                arena.give_up()


if __name__ == "__main__":
    main(sys.argv[1:])
