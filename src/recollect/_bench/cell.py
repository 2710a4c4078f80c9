"""One cell of the benchmarks, measured in a process of its own: one model, size and mode, contenders taking turns.

Contenders are models of their own that share parameters, buffers and the optimizer, so that they can take turns without
being undone. A step is forward, backward and the optimizer's. Before anything is timed each has run until nothing more
is learned or compiled, and its gradients were compared with those of the plain step. Peaks are the allocator's, over
everything; on the CPU live bytes, in a step that is not timed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recollect._bench.alternate import alternate
from recollect._bench.cases import SCALES, Case, Scale
from recollect._bench.contenders import PLAIN, Contender, list_contenders
from recollect._bench.reach import list_searches
from recollect._bench.results import Cell, Figure, Measured, Reach, Results
from recollect._core.errors import BudgetError
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.torch_private.recompiles import allow_compilations
from recollect._fit.plan import plan as make_plan
from recollect._inspect.oom.error import read_shortage
from recollect._inspect.profile import profile as take_profile
from recollect._profile.memory import LiveBytes

SHARES = (90, 75, 60, 50, 40, 30, 20)
QUICK_SHARES = (75, 50, 30)
_LEARNING, _SETTLING = 3, 1  # steps until ours runs as planned, and until others have settled
_SLOW = 6.0  # times the plain step: one step is enough to know
_MOST_COMPILATIONS = 64  # each contender has a version of the model's forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        cell: which.
        device: as torch writes it.
        rounds: how often all take a turn.
        repeats: steps of a turn.
        is_quick: whether a look is enough.
        budget_bytes: within which the largest is looked for.
        known: contenders whose largest is known already.
        limit_s: after how long no other contender's largest is looked for; None for no limit.
    """

    cell: Cell
    device: str
    rounds: int
    repeats: int
    is_quick: bool = False
    budget_bytes: int = 0
    known: tuple[str, ...] = ()
    limit_s: float | None = None


class Arena:
    """A model, its inputs and its optimizer, and the contenders that share them."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        self.model, self.inputs, self.optimizer = case.make(device)

    def take_profile(self) -> Profile:
        """The plain step, after one that made what is made lazily."""
        step = self.make_step(self.model)
        step()
        return take_profile(_run_step, step, self.model, self.optimizer, *self.inputs, name=type(self.model).__name__)

    def make_model(self) -> nn.Module:
        """Another model with the same parameters and buffers."""
        with torch.device("meta"):
            other = self.case.build()
        mine = dict(self.model.named_modules(remove_duplicate=False))
        for path, module in other.named_modules(remove_duplicate=False):
            for kind in ("_parameters", "_buffers"):
                getattr(module, kind).update(getattr(mine[path], kind))
        return other

    def make_step(
        self, call: Callable[..., Tensor], contender: Contender | None = None, *, updates: bool = True
    ) -> Callable[[], None]:
        """A step of a model."""
        around = Contender(name="").around if contender is None else contender.around

        def step() -> None:
            with around():
                loss = self.case.run_forward(call, self.inputs, self.device.type)
            loss.backward()
            del loss
            if updates:
                self.optimizer.step()
                self.optimizer.zero_grad()

        return step

    def find_norms(self, call: Callable[..., Tensor], contender: Contender) -> list[float]:
        """The norms of the gradients of a step from the same random state, which leaves the parameters as they are."""
        torch.manual_seed(1)
        self.make_step(call, contender, updates=False)()
        norms = [
            0.0 if parameter.grad is None else parameter.grad.float().norm().item()
            for parameter in self.model.parameters()
        ]
        self.optimizer.zero_grad()
        return norms

    def meter(self, step: Callable[[], object]) -> int:
        """The live bytes of a step at its peak."""
        state = [value for one in self.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
        with LiveBytes(include=[self.model, *state, *self.inputs]) as meter:
            step()
        return meter.peak_bytes


def _run_step(step: Callable[[], None], *works_with: Any) -> None:
    """Run a step. What it works with stands among the arguments, where the profiler looks for it."""
    del works_with
    step()


def measure(request: Request) -> Measured:
    """Measure one cell."""
    scale = SCALES[torch.device(request.device).type, request.cell.model, request.cell.size]
    shape = f"{scale.text}, batch {scale.batch}, {'length' if 'length' in scale.grows else 'side'} {scale.length}"
    common = Measured(cell=request.cell, shape=shape, is_quick=request.is_quick)
    if request.cell.mode.startswith("largest "):
        return _measure_largest(request, scale, common)
    arena = Arena(scale.case(), request.device)
    seen = arena.take_profile()
    plans = _make_plans(seen, QUICK_SHARES if request.is_quick else SHARES)
    contenders = list_contenders(plans, arena.device, is_compiled=request.cell.mode == "compiled")
    with allow_compilations(_MOST_COMPILATIONS):
        figures = _measure_all(arena, contenders, request)
    return replace(common, held_bytes=seen.timeline.held_bytes, figures=tuple(figures))


def _measure_largest(request: Request, scale: Scale, common: Measured) -> Measured:
    unknown = request.cell.mode.removeprefix("largest ")
    started = time.monotonic()
    found: list[Reach] = []
    is_partial = False
    for contender, search in list_searches(scale, unknown, request.device, request.budget_bytes):
        if contender in request.known:
            continue
        if request.limit_s is not None and found and time.monotonic() - started > request.limit_s:
            is_partial = True
            break
        found.append(search())
    return replace(common, budget_bytes=request.budget_bytes, reaches=tuple(found), is_partial=is_partial)


def _make_plans(seen: Profile, shares: tuple[int, ...]) -> dict[str, Plan | str]:
    held = seen.timeline.held_bytes
    span = seen.peak_bytes - held
    plans: dict[str, Plan | str] = {}
    for share in shares:
        name = f"recollect {share}%"
        try:
            plans[name] = make_plan(seen, budget=held + span * share // 100)
        except BudgetError as error:
            plans[name] = f"no plan: the smallest is {(error.smallest_bytes - held) / max(span, 1):.0%}"
    plans["recollect min"] = make_plan(seen, budget="min")
    return plans


def _measure_all(arena: Arena, contenders: list[Contender], request: Request) -> list[Figure]:
    is_compiled = request.cell.mode == "compiled"
    figures: dict[str, Figure] = {}
    steps: dict[str, Callable[[], object]] = {}
    slow: dict[str, Callable[[], object]] = {}
    plain: _Ready | None = None
    for one in contenders:
        figures[one.name] = figure = _start_figure(one)
        if one.absent:
            continue
        try:
            ready = _prepare(arena, one, is_compiled=is_compiled)
        except Exception as error:  # out of memory, or whatever a rival raises
            figures[one.name] = replace(figure, failed=_explain(error))
            arena.optimizer.zero_grad()
            _clean_up()
            continue
        plain = plain or ready
        pairs = zip(ready.norms, plain.norms, strict=True)
        difference = max(abs(own - theirs) / max(abs(theirs), 1e-12) for own, theirs in pairs)
        figures[one.name] = replace(figure, gradient_difference=difference)
        (slow if ready.step_s > _SLOW * plain.step_s else steps)[one.name] = ready.step
    clock = time.process_time if arena.device.type == "cpu" else time.perf_counter
    timings = alternate(steps, device=arena.device, rounds=request.rounds, repeats=request.repeats, clock=clock)
    for name, step in slow.items():
        timings |= alternate({name: step}, device=arena.device, rounds=1, repeats=1, clock=clock)
    for name, timing in timings.items():
        peak = timing.peak_bytes
        if arena.device.type == "cpu" and not is_compiled:  # what compiled code makes is not seen
            peak = arena.meter({**steps, **slow}[name])
        figures[name] = replace(figures[name], rounds_s=timing.rounds_s, peak_bytes=peak)
    return list(figures.values())


def _start_figure(one: Contender) -> Figure:
    forecast = None if one.plan is None else one.plan.forecast
    return Figure(
        contender=one.name,
        family=one.family,
        failed=one.absent,
        budget_bytes=None if forecast is None else forecast.budget_bytes,
        predicted_peak_bytes=None if forecast is None else forecast.peak_bytes,
        predicted_step_s=None if forecast is None else forecast.step_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A contender that has learned and compiled all there is, and how long forward and backward then took."""

    step: Callable[[], None]
    norms: list[float]
    step_s: float


def _prepare(arena: Arena, one: Contender, *, is_compiled: bool) -> _Ready:
    """Let a contender learn and compile; parameters stay as they are."""
    model = arena.model if one.name == PLAIN and not is_compiled else arena.make_model()
    one.prepare(model)
    call = torch.compile(model) if is_compiled else model
    with one.compiling():
        norms = arena.find_norms(call, one)
    learning = arena.make_step(call, one, updates=False)
    step_s = 0.0
    for _ in range(_SETTLING if one.plan is None else _LEARNING):
        start = time.perf_counter()
        learning()
        if arena.device.type != "cpu":
            torch.accelerator.synchronize()
        step_s = time.perf_counter() - start
        arena.optimizer.zero_grad()
    return _Ready(step=arena.make_step(call, one), norms=norms, step_s=step_s)


def _explain(error: Exception) -> str:
    if read_shortage(error) is not None:
        return "out of memory"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def _clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: list[str]) -> None:
    """Measure what a request, as JSON, asks for, and write it to a file."""
    asked, out = arguments
    said = json.loads(asked)
    request = Request(**{**said, "cell": Cell(**said["cell"]), "known": tuple(said.get("known", ()))})
    if torch.device(request.device).type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: a second thread mostly waits
    Path(out).write_text(Results(measured=(measure(request),)).to_json(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
