"""What regions and policies cost under torch.compile: step time, peak, compile time, gradients.

    python benchmarks/compiled.py --device cpu                            # a small model, one thread
    python benchmarks/compiled.py --device cuda --json compiled.json        # the compute-bound step
    python benchmarks/compiled.py --device cuda --quick --jobs 5 --limit 220  # what can be had in five minutes
    python benchmarks/compiled.py --device cuda --case real --limit 480     # as real_models.py --case compiled

Each candidate is compiled once, as one graph, and shows a line when it has run; then all take turns in one process. The
rivals are torch's checkpoint and its selective contexts (SAC) on the same operators, torch_remat, and the compiler's
own `activation_memory_budget`. Compile time is the first step less a later one: with caches of its own, empty, where
it is compared, which is not with `--quick`. `--jobs` compiles the others ahead in processes of their own, into the
cache that this one reads; `--limit` leaves out what has not begun by then. Needs `rich`; run it with `src` importable.
"""

import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from cases import Case, Choice, Row, Setting, main
from compiling import gradients_after, largest_difference, peak_bytes, say, timed, warm_up
from llama_like import Layers, LlamaLike
from peers import OURS, REMAT, TORCH, missing
from real_models import compiled_cases
from selective import HALF, Ops
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache
from training import COMPUTE, SMALL, Model
from ways_to_compile import BUDGETS, FULL, Candidate, candidates

from recollect._bench.alternate import Step, Timing
from recollect._bench.arena import own_code

EAGER = "plain, not compiled"
SPREAD_RUNS = 4
"""Embedding and attention add up in any order on CUDA, so that one pair of runs may agree by luck."""

# One candidate.


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A candidate that has run.

    Attributes:
        candidate: which.
        step: runs it again.
        compile_s: the first step less a later one.
        step_s: of a few steps, alone.
        peak_bytes: above parameters and gradients, of such a step.
        difference: of its gradients from those of its peer; if it has none, from its own in other runs, at most.
    """

    candidate: Candidate
    step: Step
    compile_s: float
    step_s: float
    peak_bytes: int
    difference: float


def loss_of(model: LlamaLike, ids: Tensor, run: Layers) -> Tensor:
    loss: Tensor = model(ids, run)
    return loss


def make_step(model: LlamaLike, ids: Tensor, candidate: Candidate) -> Step:
    prepared, run = candidate.prepare(model)
    loss: Callable[..., Tensor] = torch.compile(
        own_code(loss_of), fullgraph=True, dynamic=False, options=dict(candidate.options)
    )

    def step() -> None:
        model.zero_grad(set_to_none=False)
        torch.autograd.backward(loss(prepared, ids, run))

    return step


def compile_step(
    model: LlamaLike, ids: Tensor, candidate: Candidate, peers: dict[str, list[Tensor]], setting: Setting
) -> Compiled:
    gc.collect()
    with ExitStack() as stack:
        if candidate.is_timed:
            stack.enter_context(fresh_cache())
        stack.enter_context(functorch_config.patch(activation_memory_budget=candidate.budget))
        step = make_step(model, ids, candidate)
        first_s = timed(step, setting.device)
    step_s = statistics.median(timed(step, setting.device) for _ in range(3))
    gradients = gradients_after(model, step)
    if candidate.peer is None and candidate.name.startswith(TORCH) and not candidate.name.startswith(REMAT):
        peers[candidate.name] = gradients
    expected = peers.get(candidate.peer or "")
    if expected is None:
        spread = max(largest_difference(gradients_after(model, step), gradients) for _ in range(SPREAD_RUNS))
    return Compiled(
        candidate=candidate,
        step=step,
        compile_s=first_s - step_s,
        step_s=step_s,
        peak_bytes=peak_bytes(step, setting.device),
        difference=spread if expected is None else largest_difference(gradients, expected),
    )


# The cases.


def case(name: str, model_spec: Model, dtype: torch.dtype, setting: Setting) -> Iterator[Case]:
    start = time.monotonic()
    model, ids = model_spec.build(setting.device, dtype)
    ops = Ops.of(model, ids[:1])
    title = f"{model_spec}, {str(dtype).removeprefix('torch.')}, one region per block, compiled as one graph"
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder, delete=False):
        everyone = candidates(model, ops, setting)
        ahead = compile_ahead(model_spec, dtype, [one for one in everyone if not one.is_timed], setting, Path(folder))
        warm_up(setting.device)
        found = compile_all(model, ids, everyone, setting, start, ahead)
        for process in multiprocessing.active_children():
            process.terminate()
        yield same_case(name, title, found, None)
        rounds = replace(setting, rounds=2 if setting.is_quick else 4, repeats=4)
        eager: dict[str, Step] = {EAGER: lambda: train_eagerly(model, ids)}
        held = torch.accelerator.memory_allocated(setting.device) if setting.device.type != "cpu" else 0
        with dynamo_config.patch(error_on_recompile=True):
            timings = rounds.alternate(eager | {one.candidate.name: one.step for one in found})
    yield step_case(name, title, found, timings, held)
    yield same_case(name, title, found, timings)
    yield budget_case(name, title, found, timings)
    yield peak_case(name, title, found, timings)


def train_eagerly(model: LlamaLike, ids: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    torch.autograd.backward(model(ids))


def compile_ahead(
    model_spec: Model, dtype: torch.dtype, chosen: list[Candidate], setting: Setting, folder: Path
) -> dict[str, Path]:
    """Start processes that fill the cache; each marks by a file what it is done with. They end with this one."""
    marks = {one.name: folder / f"done-{number}" for number, one in enumerate(chosen)} if setting.jobs else {}
    context = multiprocessing.get_context("spawn")
    for job in range(setting.jobs):
        share = dict(list(marks.items())[job :: setting.jobs])
        with patched_environment(TORCHINDUCTOR_COMPILE_THREADS="2"):
            arguments = (model_spec, dtype, replace(setting, jobs=0), share)
            context.Process(target=fill_cache, args=arguments, daemon=True).start()
    return marks


def fill_cache(model_spec: Model, dtype: torch.dtype, setting: Setting, marks: dict[str, Path]) -> None:
    """What such a process does; the cache is the one that it inherits."""
    torch.set_num_threads(1)
    model, ids = model_spec.build(setting.device, dtype)
    everyone = {one.name: one for one in candidates(model, Ops.of(model, ids[:1]), setting)}
    for name, mark in marks.items():
        try:
            with functorch_config.patch(activation_memory_budget=everyone[name].budget):
                timed(make_step(model, ids, everyone[name]), setting.device)
        except Exception as error:  # shown in full by the one who needs it
            say(f"ahead, {name}: {type(error).__name__}")
        finally:
            mark.touch()
            torch.cuda.empty_cache()  # others share the device


@contextmanager
def patched_environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compile_all(
    model: LlamaLike, ids: Tensor, everyone: list[Candidate], setting: Setting, start: float, ahead: dict[str, Path]
) -> list[Compiled]:
    def is_over() -> bool:
        return setting.limit_s is not None and time.monotonic() - start > setting.limit_s

    found: list[Compiled] = []
    peers: dict[str, list[Tensor]] = {}
    for candidate in everyone:
        mark = ahead.get(candidate.name)
        while mark is not None and not mark.exists() and not is_over() and multiprocessing.active_children():
            time.sleep(0.1)
        if is_over():
            say(f"{candidate.name}: left out, {setting.limit_s} s are over")
            continue
        try:
            one = compile_step(model, ids, candidate, peers, setting)
        except Exception as error:  # a rival that does not compile is a finding, not the end
            say(f"{candidate.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        found.append(one)
        say(
            f"{time.monotonic() - start:6.1f} s  {candidate.name}: compiled in {one.compile_s:.2f} s"
            f"{' with empty caches' if candidate.is_timed else ''}, step {one.step_s * 1e3:.1f} ms, "
            f"peak {one.peak_bytes / 2**20:,.1f} MiB, gradients differ by {one.difference:.1e}"
        )
    return found


def step_case(name: str, title: str, found: list[Compiled], timings: dict[str, Timing], held_bytes: int) -> Case:
    shown = Case(name=name, title=f"{title}: a training step, in turns")
    plain_s = timings[EAGER].best_s
    eager_peak = timings[EAGER].peak_bytes
    bottom: Row = {"candidate": EAGER, "median_ms": timings[EAGER].median_s * 1e3, "best_ms": plain_s * 1e3}
    if eager_peak is not None:
        bottom["peak_bytes"] = eager_peak - held_bytes
    shown.rows.append(bottom | {"best/plain": 1.0})
    for one in found:
        timing = timings[one.candidate.name]
        row: Row = {
            "candidate": one.candidate.name,
            "median_ms": timing.median_s * 1e3,
            "best_ms": timing.best_s * 1e3,
            "peak_bytes": one.peak_bytes,
            "best/plain": timing.best_s / plain_s,
        }
        if eager_peak is not None:
            row["peak/plain"] = one.peak_bytes / (eager_peak - held_bytes)
        shown.rows.append(row | {"compile_s": one.compile_s, "gradient_difference": one.difference})
    return shown


def same_case(name: str, title: str, found: list[Compiled], timings: dict[str, Timing] | None) -> Case:
    """Ours against torch's with the same policy; without timings, by the steps that each took alone."""
    alone = ", each alone" if timings is None else ", in turns"
    asked = "asked: time <= 1.01, peak <= 1.01, compile <= 1.1, gradients within the spread of torch's own runs"
    shown = Case(name=name, title=f"{title}: ours over torch's{alone}\n{asked}")
    by_name = {one.candidate.name: one for one in found}
    for one in found:
        peer = by_name.get(one.candidate.peer or "")
        if peer is None:
            continue
        row: Row = {"candidate": one.candidate.name, "time/torch": _seconds(one, timings) / _seconds(peer, timings)}
        row["peak/torch"] = one.peak_bytes / peer.peak_bytes
        if one.candidate.is_timed:
            row["compile/torch"] = one.compile_s / peer.compile_s
        shown.rows.append(row | {"gradient_difference": one.difference, "spread": f"{peer.difference:.1e}"})
    return shown


def budget_case(name: str, title: str, found: list[Compiled], timings: dict[str, Timing]) -> Case:
    """For each of the compiler's budgets, the policy of ours that is no slower and peaks lowest."""
    shown = Case(name=name, title=f"{title}: the compiler's budgets against the best of ours that is no slower")
    ours = [one for one in found if one.candidate.name.startswith(OURS)]
    for theirs in found:
        if theirs.candidate.budget == 1.0:
            continue
        budget_s = _seconds(theirs, timings)
        row: Row = {"candidate": theirs.candidate.name, "best_ms": budget_s * 1e3, "peak_bytes": theirs.peak_bytes}
        fitting = [one for one in ours if _seconds(one, timings) <= budget_s]
        best = min(fitting, key=lambda one: one.peak_bytes, default=None)
        if best is not None:
            row |= {
                "ours": best.candidate.name,
                "ours_ms": _seconds(best, timings) * 1e3,
                "ours_bytes": best.peak_bytes,
                "peak/budget": best.peak_bytes / theirs.peak_bytes,
            }
        shown.rows.append(row | {"asked": BUDGETS[theirs.candidate.budget]})
    return shown


def peak_case(name: str, title: str, found: list[Compiled], timings: dict[str, Timing]) -> Case:
    """For each of torch's policies, the fastest of ours that peaks no higher."""
    shown = Case(name=name, title=f"{title}: torch's policies against the fastest of ours within their peak")
    ours = [one for one in found if one.candidate.name.startswith(OURS)]
    for theirs in found:
        if theirs.candidate.name not in {f"{TORCH} {FULL}", f"{TORCH} {HALF.name}"}:
            continue
        their_s = _seconds(theirs, timings)
        row: Row = {"candidate": theirs.candidate.name, "best_ms": their_s * 1e3, "peak_bytes": theirs.peak_bytes}
        fitting = [one for one in ours if one.peak_bytes <= theirs.peak_bytes]
        best = min(fitting, key=lambda one: _seconds(one, timings), default=None)
        if best is not None:
            own_s = _seconds(best, timings)
            row |= {"ours": best.candidate.name, "ours_ms": own_s * 1e3, "ours_bytes": best.peak_bytes}
            row["time/torch"] = own_s / their_s
        shown.rows.append(row | {"asked": 0.97})
    return shown


def _seconds(one: Compiled, timings: dict[str, Timing] | None) -> float:
    return one.step_s if timings is None else timings[one.candidate.name].best_s


TINY = replace(SMALL, layers=2, tokens=256)
CHOICES = {
    "small": Choice(measure=partial(case, "small", TINY, torch.float32), devices=("cpu",), unasked=("cpu",)),
    "compute": Choice(measure=partial(case, "compute", COMPUTE, torch.bfloat16), devices=("cuda",), unasked=("cuda",)),
    "real": Choice(measure=compiled_cases),
}


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], CHOICES, skipped=missing())
