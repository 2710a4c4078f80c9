"""How long compiled steps wait for values that are in host memory: budgets with and without it, in turns.

    python benchmarks/waiting.py                       # the large Llama of `recollect bench`, on a GPU
    python benchmarks/waiting.py --shares 60 40 --size small

Budgets are shares of what the plain compiled step takes beyond parameters and inputs. Each contender is compiled in a
process of its own first, all at once, into a cache that this one reads. Then all take turns; and one step of each is
traced: how long the device was busy, how long it stood still, and what the link carried meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from devices import refuse_missing
from torch.profiler import ProfilerActivity, profile

import recollect
from recollect._bench.arena import Arena, own_code
from recollect._bench.cases import SCALES

PLAIN = "plain"
GIB = 2**30
ROUNDS, STEPS = 4, 4
LEAST_GAP_US = 100  # between two kernels


def call_model(model: Any, *inputs: torch.Tensor) -> Any:
    return model(*inputs)


def make_step(arena: Arena, budget_bytes: int | None, tiers: str | None) -> Callable[[], None]:
    options: dict[str, Any] = {}
    if budget_bytes is not None:
        options = {"custom_partitioner_fn": recollect.partitioner(budget=budget_bytes, tiers=tiers)}
    call = partial(torch.compile(own_code(call_model), options=options), arena.model)

    def step() -> None:
        arena.case.run_forward(call, arena.inputs, "cuda").backward()
        arena.optimizer.zero_grad()

    return step


def find_peak(step: Callable[[], None]) -> int:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def compile_ahead(ways: list[list[Any]], name: str, size: str) -> None:
    asked = [[sys.executable, __file__, "--model", name, "--size", size, "--compile", json.dumps(way)] for way in ways]
    started = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in asked]
    for process in started:
        process.wait()


def trace(step: Callable[[], None]) -> str:
    """What the device did in one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    kernels = sorted((one for one in events if one.get("cat") == "kernel"), key=lambda one: one["ts"])
    still_us, last = 0.0, kernels[0]["ts"]
    for one in kernels:
        gap = one["ts"] - last
        still_us += gap if gap > LEAST_GAP_US else 0.0
        last = max(last, one["ts"] + one["dur"])
    carried: Counter[str] = Counter()
    for one in events:
        if one.get("cat") == "gpu_memcpy":
            way = next((words for words in ("DtoH", "HtoD") if words in one["name"]), "")
            carried[way] += one["args"].get("bytes", 0)
    busy_ms = sum(one["dur"] for one in kernels) / 1e3
    return (
        f"busy {busy_ms:.1f} ms, still {still_us / 1e3:.1f} ms, out {carried['DtoH'] / GIB:.2f} GiB, "
        f"back {carried['HtoD'] / GIB:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Llama")
    parser.add_argument("--size", default="large", choices=("small", "large"))
    parser.add_argument("--shares", type=int, nargs="+", default=[50, 30], help="of the plain step's activations")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    refuse_missing(parser, "cuda")
    arena = Arena(SCALES["cuda", options.model, options.size].case(), "cuda")
    if options.compile:
        make_step(arena, *json.loads(options.compile))()
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        run(arena, options)


def run(arena: Arena, options: argparse.Namespace) -> None:
    held = arena.model_bytes
    steps = {PLAIN: make_step(arena, None, None)}
    span = find_peak(steps[PLAIN]) - held
    ways = [[held + span * share // 100, tiers] for share in options.shares for tiers in (None, "host")]
    compile_ahead(ways, options.model, options.size)
    torch._dynamo.config.recompile_limit = 64
    for share, tiers in ((share, tiers) for share in options.shares for tiers in (None, "host")):
        name = f"{share}%{', host' if tiers else ''}"
        steps[name] = make_step(arena, held + span * share // 100, tiers)
        steps[name]()
    took, peaks = defaultdict(list), dict[str, int]()
    for turn in range(ROUNDS):
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            peaks[name] = find_peak(steps[name])
            for _ in range(STEPS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                steps[name]()
                torch.cuda.synchronize()
                took[name].append((time.perf_counter() - start) * 1e3)
    plain_ms = median(took[PLAIN])
    for name, step in steps.items():
        print(
            f"{name:12} median {median(took[name]):.1f} ms ({median(took[name]) / plain_ms:.3f} of plain), best "
            f"{min(took[name]):.1f}, peak {(peaks[name] - held) / span:.2f} of plain's; {trace(step)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
