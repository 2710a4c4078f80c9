"""Measures what regions cost the host where a plan is made, in some tenths of a second: small models wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recollect._apply.function import checkpoint
from recollect._core.decisions import Decision
from recollect._core.plans import Choice, Plan
from recollect._plan.overheads import USUAL, Overhead
from recollect._policy.by_plan import ByPlan
from recollect._selective.knowledge import learning_apart

_KEPT = Plan(choices=(Choice(decision=Decision.SAVE, op="aten.cos.default"),))
_SIZES = (8, 40)  # calls of torch: two tell what a region costs from what a call does
_WARM, _REPEATS = 4, 7
_FARTHEST = 16.0  # from what is usual: beyond that it was not the region that took so long
Step = Callable[[Tensor], Tensor]
Times = list[tuple[float, float]]


def measure_overheads(device: str = "cpu", *, is_autocast: bool = False) -> dict[str, Overhead]:
    """What each way costs here, by its name; what is usual where it is not measured.

    Args:
        device: where the step runs: its generators and its thread for backward take part.
        is_autocast: whether it runs under autocast, which regions then restore.
    """
    found = dict(USUAL)
    bench = _Bench(device, is_autocast=is_autocast)
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with learning_apart(), torch.enable_grad(), torch.random.fork_rng(devices):
        plain = [bench.time(_make_step(size)) for size in _SIZES]
        for way in ("rerun", "serve", "replay"):
            # As a plan has it. Any other policy would not replay on an accelerator what is so small.
            policy = None if way == "rerun" else ByPlan(_KEPT, "that is measured", way)
            steps = (_make_step(size) for size in _SIZES)
            found[way] = _tell_apart(USUAL[way], plain, [bench.time(checkpoint(step, policy=policy)) for step in steps])
            if way == "replay":
                drawn = [bench.time(_make_step(size, draws=True)) for size in _SIZES]
                steps = (_make_step(size, draws=True) for size in _SIZES)
                with_draws = _tell_apart(
                    USUAL[way], drawn, [bench.time(checkpoint(step, policy=policy)) for step in steps]
                )
                more_s = with_draws.forward_s + with_draws.again_s - found[way].forward_s - found[way].again_s
                found[way] = replace(found[way], random_s=max(0.0, more_s))
    return found


def _make_step(size: int, *, draws: bool = False) -> Step:
    def step(x: Tensor) -> Tensor:
        x = torch.cos(x)
        for _ in range(size):
            x = torch.dropout(x, 0.5, True) if draws else torch.sin(x)  # noqa: FBT003
        return x

    return step


class _Bench:
    """Times steps on one device."""

    def __init__(self, device: str, *, is_autocast: bool) -> None:
        self._device, self._is_autocast = device, is_autocast

    def time(self, step: Step) -> tuple[float, float]:
        """The host's shortest forward and its shortest backward."""
        forward_s, backward_s = [], []
        x = torch.ones(4, device=self._device, requires_grad=True)
        seed = torch.ones(4, device=self._device)
        for number in range(_WARM + _REPEATS):
            started = time.perf_counter()
            with torch.autocast(self._device, torch.bfloat16, enabled=self._is_autocast):
                made = step(x)
            between = time.perf_counter()
            torch.autograd.grad(made, x, seed)
            if number >= _WARM:
                forward_s.append(between - started)
                backward_s.append(time.perf_counter() - between)
        return min(forward_s), min(backward_s)


def _tell_apart(usual: Overhead, plain: Times, regions: Times) -> Overhead:
    """What regions took beyond the plain steps, and beyond making their calls again, by region and by call."""
    forward = [region[0] - own[0] for region, own in zip(regions, plain, strict=True)]
    again = [region[1] - own[1] - own[0] for region, own in zip(regions, plain, strict=True)]
    between = _SIZES[1] - _SIZES[0]
    forward_s, again_s = (forward[1] - forward[0]) / between, (again[1] - again[0]) / between
    region_s = forward[0] + again[0] - _SIZES[0] * (forward_s + again_s)
    return replace(
        usual,
        region_s=_limit(region_s, usual.region_s),
        forward_s=_limit(forward_s, usual.forward_s),
        again_s=_limit(again_s, usual.again_s),
    )


def _limit(seconds: float, usual_s: float) -> float:
    return min(max(seconds, usual_s / _FARTHEST), usual_s * _FARTHEST)
