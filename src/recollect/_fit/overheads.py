"""Measures what regions cost the host where a plan is made, in a tenth of a second: small models wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recollect._apply.function import checkpoint
from recollect._plan.overheads import USUAL, Overhead
from recollect._policy.rules import save_ops
from recollect._selective.knowledge import learning_apart

_SIZES = (8, 40)  # calls of torch: two tell what a region costs from what a call does
_WARM, _REPEATS = 4, 7
_FARTHEST = 8.0  # from what is usual: beyond that it was not the region that took so long
Step = Callable[[Tensor], Tensor]


def measure_overheads() -> dict[str, Overhead]:
    """What each way costs here, by its name; what is usual where it cannot be measured."""
    found = dict(USUAL)
    with learning_apart(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        plain = [_time(_make_step(size)) for size in _SIZES]
        for way in ("rerun", "serve", "replay"):
            policy = None if way == "rerun" else save_ops("aten.cos.default")
            regions = [_time(checkpoint(_make_step(size, writes=way == "serve"), policy=policy)) for size in _SIZES]
            found[way] = _tell_apart(USUAL[way], plain, regions)
    return found


def _make_step(size: int, *, writes: bool = False) -> Step:
    def step(x: Tensor) -> Tensor:
        x = torch.cos(x)
        if writes:  # which cannot be replayed
            x = (x + 1.0).mul_(1.0)
        for _ in range(size):
            x = torch.sin(x)
        return x

    return step


def _time(step: Step) -> tuple[float, float]:
    """The shortest forward and the shortest backward."""
    forward_s, backward_s = [], []
    x = torch.ones(4, device="cpu", requires_grad=True)
    seed = torch.ones(4, device="cpu")
    for number in range(_WARM + _REPEATS):
        started = time.perf_counter()
        made = step(x)
        between = time.perf_counter()
        torch.autograd.grad(made, x, seed)
        if number >= _WARM:
            forward_s.append(between - started)
            backward_s.append(time.perf_counter() - between)
    return min(forward_s), min(backward_s)


def _tell_apart(usual: Overhead, plain: list[tuple[float, float]], regions: list[tuple[float, float]]) -> Overhead:
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
