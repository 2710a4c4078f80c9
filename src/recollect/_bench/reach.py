"""How large a batch or how long a context stays within a budget, measured: each size is run."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from recollect._apply.model import apply
from recollect._bench.cases import Case, Scale
from recollect._bench.contenders import OURS, Contender, list_contenders
from recollect._bench.results import Reach
from recollect._core.errors import BudgetError
from recollect._core.plans import Plan
from recollect._fit.largest import search_largest
from recollect._fit.plan import plan as make_plan
from recollect._inspect.oom.error import read_shortage
from recollect._inspect.profile import profile as take_profile
from recollect._profile.memory import LiveBytes

_LEARNING = 3  # steps of ours until it runs as planned
_SKIPPED = ("torch reentrant", "torch every 2nd block", "xformers' planner 0.7", "xformers' planner 0.4")
"""Each has a sibling that takes less memory."""


def list_searches(
    scale: Scale, unknown: str, device: str, budget_bytes: int
) -> Iterator[tuple[str, Callable[[], Reach]]]:
    """Each contender's name, and a function that looks for its largest batch or length.

    Args:
        scale: the model, and where to start.
        unknown: ``"batch"`` or ``"length"``.
        device: where to run.
        budget_bytes: the most that a step may take of the device, over everything.
    """
    ours = [Contender(name=OURS, family=OURS)]
    if device != "cpu":
        ours.append(Contender(name=f"{OURS}, host", family=OURS, tiers="host"))
    for one in (*ours, *list_contenders([], torch.device(device), is_compiled=False)):
        if one.name not in _SKIPPED:
            yield one.name, functools.partial(_search, one, scale, unknown, device, budget_bytes)


def _search(one: Contender, scale: Scale, unknown: str, device: str, budget_bytes: int) -> Reach:
    reach = Reach(contender=one.name, family=one.family)
    if one.absent:
        return replace(reach, failed=one.absent)
    multiple_of = 1 if unknown == "batch" else 64 if device == "cpu" else 512
    taken: dict[int, tuple[int, float]] = {}

    def excess(count: int) -> int:
        case = scale.case(**{unknown: count * multiple_of})
        found = _Trial(case, device, one, budget_bytes).run()
        if isinstance(found, int):
            return found
        taken[count] = found
        return found[0] - budget_bytes

    try:
        count = search_largest(excess, start=max(1, getattr(scale, unknown) // multiple_of))
    except Exception as error:  # whatever a rival raises
        message = str(error).partition("\n")[0][:120]
        return replace(reach, failed=f"{type(error).__name__}: {message}")
    peak_bytes, step_s = taken.get(count, (None, None))
    return replace(reach, value=count * multiple_of, peak_bytes=peak_bytes, step_s=step_s)


class _Trial:
    """One size of one contender, built anew: nothing is left of the size before."""

    def __init__(self, case: Case, device: str, contender: Contender, budget_bytes: int) -> None:
        gc.collect()
        self._case, self._device, self._contender, self._budget = case, torch.device(device), contender, budget_bytes
        torch.manual_seed(0)

    def run(self) -> tuple[int, float] | int:
        """The peak and the time of a step; or how much too much it would be, where it cannot run."""
        if self._device.type != "cpu":
            torch.cuda.empty_cache()
        try:
            return self._run()
        except RuntimeError as error:
            if read_shortage(error) is None:
                raise
            return self._budget

    def _run(self) -> tuple[int, float] | int:
        model, inputs, optimizer = self._case.make(str(self._device))
        if self._contender.family == OURS:
            plan = self._plan()
            if isinstance(plan, int):
                return plan
            apply(model, plan)
        else:
            self._contender.prepare(model)

        step = functools.partial(self._step, model, optimizer, *inputs)
        for _ in range(_LEARNING if self._contender.family == OURS else 1):
            step()
        if self._device.type == "cpu":
            return self._meter(step, [*model.parameters(), *model.buffers(), *inputs], optimizer)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step_s = self._time(step)
        return torch.cuda.max_memory_allocated(), step_s

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
        with self._contender.around():
            loss = self._case.run_forward(model, inputs, self._device.type)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    def _plan(self) -> Plan | int:
        """The plan of a step that need not fit as it is; or by how much the smallest is too large."""
        on = "meta" if self._device.type != "cpu" else "cpu"
        model, inputs, optimizer = self._case.make(on)
        if on == "cpu":
            self._step(model, optimizer, *inputs)  # makes the optimizer's state; a dry step counts it by itself
        dry = {"dry": True, "device": "cuda"} if on == "meta" else {}
        seen = take_profile(self._step, model, optimizer, *inputs, **dry)  # type: ignore[arg-type]
        try:
            return make_plan(seen, budget=self._budget, tiers=self._contender.tiers)
        except BudgetError as error:
            return max(1, error.smallest_bytes - self._budget)

    def _meter(
        self, step: Callable[[], None], held: list[Tensor], optimizer: torch.optim.Optimizer
    ) -> tuple[int, float]:
        state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
        with LiveBytes(include=[*held, *state]) as meter:
            step()
        return meter.peak_bytes, self._time(step)

    def _time(self, step: Callable[[], None]) -> float:
        start = time.perf_counter()
        step()
        if self._device.type != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start
