"""Measures what regions cost the host where a plan is made, in some tenths of a second: small models wait for it.

What a call of torch costs in a region depends on what it is given and what it saves. So the calls are those of a block
of a transformer, the most usual ones, on tensors so small that nothing but the host counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect._apply.model import apply
from recollect._core.decisions import Decision
from recollect._core.plans import Choice, Plan
from recollect._plan.overheads import USUAL, Overhead
from recollect._policy.base import Policy
from recollect._policy.by_plan import ByPlan
from recollect._selective.knowledge import learning_apart

CALLS = 19
"""Of torch, in a layer."""

_SIZES = (1, 3)  # layers in a region: two sizes tell what a region costs from what its calls do
_DRAWS = 3  # calls of a layer with dropout; attention counts as drawing where something else draws
_WIDTH, _TOKENS = 8, 4
_DROPOUT = 0.1
_WARM, _ROUNDS, _REPEATS = 4, 4, 3
_LONG_S = 0.5  # after that no further round begins: on a machine that is busy, single steps take tens of milliseconds
_WAYS = ("plain", "rerun", "serve", "replay")
_FEWER, _DRAWING, _PLAIN_DRAWING = "replay of fewer calls", "replay that draws", "plain that draws"
_FARTHEST = 16.0  # from what is usual: beyond that it was not the region that took so long
NORMS = "aten.native_layer_norm.default"
_OTHERS = ("aten.addmm.default", "aten.mm.default", "aten.add.Tensor")
_AGAIN, _AGAIN_FEWER = (6, 22), 6
"""How many calls, views apart, are made again: for each size if norms are kept, for the larger if others are, too."""


class Layer(nn.Module):
    """A layer of a transformer of one head: `CALLS` calls of torch, and with dropout one more for each that draws."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (1, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.dropout else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What the host takes for a step, at the least.

    Attributes:
        forward_s: for its forward.
        backward_s: for its backward.
    """

    forward_s: float
    backward_s: float

    def __sub__(self, other: Times) -> Times:
        return Times(forward_s=self.forward_s - other.forward_s, backward_s=self.backward_s - other.backward_s)


Timed = Mapping[tuple[str, int], Times]
"""The steps, by what becomes of their region and by its size."""

Key = TypeVar("Key", bound=Hashable)


@functools.lru_cache(maxsize=8)
def measured_overheads(device: str, *, is_autocast: bool) -> Mapping[str, Overhead]:
    """What `measure_overheads` found here, measured once: the host is the same for every profile of a process."""
    return measure_overheads(device, is_autocast=is_autocast)


def measure_overheads(device: str = "cpu", *, is_autocast: bool = False) -> dict[str, Overhead]:
    """What each way costs here, by its name; what is usual where it is not measured.

    Args:
        device: where the step runs: its generators and its thread for backward take part.
        is_autocast: whether it runs under autocast, which regions then restore.
    """
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with learning_apart(), torch.enable_grad(), torch.random.fork_rng(devices):
        times = _time_all(device, is_autocast=is_autocast)
    return {
        **USUAL,
        "rerun": _tell_apart(USUAL["rerun"], times, "rerun", again=[size * CALLS for size in _SIZES]),
        "serve": _tell_apart(USUAL["serve"], times, "serve", again=[size * CALLS for size in _SIZES]),
        "replay": _read_replay(times),
    }


def _time_all(device: str, *, is_autocast: bool) -> dict[tuple[str, int], Times]:
    """Steps of one region each, by what becomes of it and its size."""
    whats: dict[str, tuple[Policy | str | None, float]] = {
        "plain": (None, 0.0),
        "rerun": ("full", 0.0),
        "serve": (keep("serve", NORMS), 0.0),
        "replay": (keep("replay", NORMS), 0.0),
        _FEWER: (keep("replay", NORMS, *_OTHERS), 0.0),
        _PLAIN_DRAWING: (None, _DROPOUT),
        _DRAWING: (keep("replay", NORMS), _DROPOUT),
    }
    models: dict[tuple[str, int], nn.Module] = {}
    with ExitStack() as stack:
        for name, (what, dropout) in whats.items():
            for size in _SIZES if name in _WAYS else _SIZES[1:]:
                layers = (Layer(_WIDTH, dropout) for _ in range(size))
                model = models[name, size] = nn.Sequential(nn.Sequential(*layers)).to(device)
                if what is not None:
                    stack.enter_context(apply(model, {"0": what}))
        x = torch.ones(1, _TOKENS, _WIDTH, device=device, requires_grad=True)
        return time_in_turn(models, lambda model: time_once(model, x, is_autocast=is_autocast), warm=_WARM)


def time_in_turn(models: Mapping[Key, nn.Module], once: Callable[[nn.Module], Times], *, warm: int) -> dict[Key, Times]:
    """What steps of models take at the least, after so many that do not count; no more rounds than there is time for.

    They take turns: a machine has slow moments.
    """
    for model in models.values():
        for _ in range(warm):
            once(model)
    found: dict[Key, list[Times]] = {key: [] for key in models}
    started = time.perf_counter()  # a device loads its kernels while they get warm, which may take seconds
    for rounds in range(_ROUNDS):
        if rounds and time.perf_counter() - started > _LONG_S:
            break
        for key, model in models.items():
            found[key] += [once(model) for _ in range(_REPEATS)]
    return {
        key: Times(forward_s=min(one.forward_s for one in times), backward_s=min(one.backward_s for one in times))
        for key, times in found.items()
    }


def keep(way: str, *ops: str, decision: Decision = Decision.SAVE) -> Policy:
    """A policy as plans have it. Any other would not replay on an accelerator what is so small."""
    return ByPlan(Plan(choices=tuple(Choice(decision=decision, op=op) for op in ops)), f"to {way}", way)


def time_once(model: nn.Module, x: Tensor, *, is_autocast: bool) -> Times:
    """What the host takes for one step of a model."""
    seed, wanted = torch.ones_like(x), [x, *model.parameters()]
    started = time.perf_counter()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=is_autocast):
        made = model(x)
    between = time.perf_counter()
    torch.autograd.grad(made, wanted, seed)
    return Times(forward_s=between - started, backward_s=time.perf_counter() - between)


def _tell_apart(usual: Overhead, times: Timed, way: str, *, again: Sequence[int]) -> Overhead:
    """What regions take beyond the plain steps, and beyond making calls again, by region and by call.

    Args:
        usual: what is usual.
        times: of all steps.
        way: of the regions.
        again: for each size, how many calls they make again.
    """
    small, large = (
        replace(more, backward_s=more.backward_s - plain.forward_s * made / (size * CALLS))
        for size, made in zip(_SIZES, again, strict=True)
        for plain in [times["plain", size]]
        for more in [times[way, size] - plain]
    )
    first, last = (size * CALLS for size in _SIZES)
    forward_s = (large.forward_s - small.forward_s) / (last - first)
    backward_s = (large.backward_s - small.backward_s) / (last - first)
    return replace(
        usual,
        region_forward_s=limit(small.forward_s - first * forward_s, usual.region_forward_s),
        call_forward_s=limit(forward_s, usual.call_forward_s),
        region_backward_s=limit(small.backward_s - first * backward_s, usual.region_backward_s),
        call_backward_s=limit(backward_s, usual.call_backward_s),
    )


def _read_replay(times: Timed) -> Overhead:
    """Likewise for replay, where calls that are made again are told from those that are not, and those that draw."""
    usual, size = USUAL["replay"], _SIZES[1]
    found = _tell_apart(usual, times, "replay", again=_AGAIN)
    plain, plain_drawing = times["plain", size], times[_PLAIN_DRAWING, size]
    most, drawing = times["replay", size] - plain, times[_DRAWING, size] - plain_drawing
    own_s = plain.forward_s / (size * CALLS)
    more_s = (most - (times[_FEWER, size] - plain)).backward_s
    again_s = limit(more_s / (_AGAIN[1] - _AGAIN_FEWER) - own_s, usual.again_s)
    share = _AGAIN[1] / (size * CALLS)
    again_s = min(again_s, found.call_backward_s / share)
    drawn_s = drawing.backward_s - most.backward_s - (plain_drawing.forward_s - plain.forward_s)
    return replace(
        found,
        call_backward_s=found.call_backward_s - again_s * share,
        again_s=again_s,
        random_forward_s=limit((drawing - most).forward_s / (size * _DRAWS), usual.random_forward_s),
        random_again_s=limit(drawn_s / (size * _DRAWS), usual.random_again_s),
    )


def limit(seconds: float, usual_s: float) -> float:
    """What was measured, unless it is so far from what is usual that it was something else."""
    return min(max(seconds, usual_s / _FARTHEST), usual_s * _FARTHEST)
