"""Measures what sending values away costs the host where a plan is made: on a device, with real copies.

For each value the host runs a hook, takes pinned memory, meets streams, begins a copy and lets go of memory; the same
on the way back. The values are just so large that they travel one by one, as those that plans send: smaller ones go in
batches. Two things are told apart: what a region pays for hooks around it, which change how it runs, and what each
value costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recollect._apply.model import apply
from recollect._core.decisions import Decision
from recollect._core.timetables import LEAST_BYTES, TOGETHER
from recollect._fit.overheads import (
    CALLS,
    NORMS,
    Layer,
    Times,
    keep,
    limit,
    measured_overheads,
    time_in_turn,
    time_once,
)
from recollect._offload.offload import Offload, measuring_offloads
from recollect._plan.overheads import USUAL, Overhead, name_overhead
from recollect._selective.knowledge import learning_apart

_REGIONS = 3  # of one layer each: what the last of them sends is needed at once, and stays
_WIDTH, _TOKENS = 64, 64
_WARM = 6  # steps until offloads go by a timetable, and regions replay
_PLAIN, _STAYING, _OFFLOAD = "plain", "offload of nothing", "offload"
_RERUN, _SERVE, _REPLAY = "rerun", "serve", "replay"
_RERUN_SENDING, _SERVE_SENDING, _REPLAY_SENDING = (name_overhead(way, sends=True) for way in (_RERUN, _SERVE, _REPLAY))
_NOTHING = 2**62
_STEPS: Mapping[str, int | None] = {
    _PLAIN: None,
    _STAYING: _NOTHING,
    _OFFLOAD: LEAST_BYTES,
    _RERUN: None,
    _RERUN_SENDING: LEAST_BYTES,
    _REPLAY: None,
    _REPLAY_SENDING: LEAST_BYTES,
    _SERVE_SENDING: LEAST_BYTES,
}
"""What becomes of regions in steps that are timed, and from how many bytes on values are sent."""

MakeAway = Callable[[int], Offload]
"""Makes an offload for values of at least so many bytes."""


@functools.lru_cache(maxsize=8)
def measured_sending(device: str, *, is_autocast: bool) -> Mapping[str, Overhead]:
    """What `measure_sending` found here, measured once; nothing where the device has no room for it."""
    known = measured_overheads(device, is_autocast=is_autocast)
    try:
        with measuring_offloads() as make_away:
            return measure_sending(known, device, is_autocast=is_autocast, make_away=make_away)
    except torch.OutOfMemoryError:
        return {}


def measure_sending(
    known: Mapping[str, Overhead],
    device: str,
    *,
    is_autocast: bool,
    make_away: MakeAway,
    shape: Sequence[int] | None = None,
) -> dict[str, Overhead]:
    """What ways that send values cost here, by name.

    Args:
        known: what ways that send nothing cost here.
        device: where the step runs.
        is_autocast: whether it runs under autocast.
        make_away: makes what sends.
        shape: of what layers are given: batch, tokens, width. None for values that travel one by one.
    """
    if shape is None:
        rows = TOGETHER // (_WIDTH * (torch.bfloat16 if is_autocast else torch.float32).itemsize)
        shape = (rows // _TOKENS, _TOKENS, _WIDTH)
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with learning_apart(), torch.enable_grad(), torch.random.fork_rng(devices), ExitStack() as stack:
        aways: dict[str, Offload] = {}
        models: dict[str, nn.Module] = {}
        for name, least_bytes in _STEPS.items():
            model = models[name] = nn.Sequential(_Entry(), *(Layer(shape[-1]) for _ in range(_REGIONS))).to(device)
            if least_bytes is not None:
                aways[name] = make_away(least_bytes)
            rule = _find_rule(name, aways.get(name))
            if rule is not None:
                stack.enter_context(apply(model, {str(number + 1): rule for number in range(_REGIONS)}))
        x = torch.ones(shape, device=device, requires_grad=True)
        times = time_in_turn(models, functools.partial(_time_alone, x=x, is_autocast=is_autocast), warm=_WARM)
        values = {key: away.report().values for key, away in aways.items()}
    return _read(known, times, values)


class _Entry(nn.Module):
    """Makes what the first region is given: of a leaf nothing would be sent. It saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0


def _find_rule(name: str, away: Offload | None) -> Any:
    """What `recollect.apply` is to make of the regions: what it makes of those of plans."""
    if name in (_STAYING, _OFFLOAD):
        return away
    rules: dict[str, Any] = {
        _RERUN: "full",
        _RERUN_SENDING: {"offload_inputs": True, "offload_to": away},
        _SERVE_SENDING: {"policy": keep(_SERVE, NORMS), "offload_inputs": True, "offload_to": away},
        _REPLAY: keep(_REPLAY, NORMS),
        _REPLAY_SENDING: {"policy": keep(_REPLAY, NORMS, decision=Decision.OFFLOAD), "offload_to": away},
    }
    return rules.get(name)


def _time_alone(model: nn.Module, *, x: Tensor, is_autocast: bool) -> Times:
    """What the host takes for a step on a device that has nothing else to do: its queues must not fill up."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time_once(model, x, is_autocast=is_autocast)


def _read(known: Mapping[str, Overhead], times: Mapping[str, Times], values: Mapping[str, int]) -> dict[str, Overhead]:
    usual, plain = USUAL[_OFFLOAD], times[_PLAIN]
    more, count = times[_OFFLOAD] - times[_STAYING], max(1, values[_OFFLOAD])
    value = Times(
        forward_s=limit(more.forward_s / count, usual.value_forward_s),
        backward_s=limit(more.backward_s / count, usual.value_backward_s),
    )
    beyond = {
        name: Times(
            forward_s=(one.forward_s - plain.forward_s - sent * value.forward_s) / _REGIONS,
            backward_s=(one.backward_s - plain.backward_s - sent * value.backward_s) / _REGIONS,
        )
        for name, one in times.items()
        for sent in [values.get(name, 0)]
    }
    again = Times(forward_s=0.0, backward_s=plain.forward_s / _REGIONS)
    found = {
        _OFFLOAD: _scale(usual, beyond[_STAYING]),
        _SERVE_SENDING: _scale(USUAL[_SERVE_SENDING], beyond[_SERVE_SENDING] - again),
        _RERUN_SENDING: _add(known, _RERUN, beyond[_RERUN_SENDING] - beyond[_RERUN]),
        _REPLAY_SENDING: _add(known, _REPLAY, beyond[_REPLAY_SENDING] - beyond[_REPLAY]),
    }
    return {
        name: replace(one, value_forward_s=value.forward_s, value_backward_s=value.backward_s)
        for name, one in found.items()
    }


def _scale(usual: Overhead, measured: Times) -> Overhead:
    """What is usual, so much more or less that a region of one layer takes what was measured."""
    forward_s, backward_s = usual.forward_s(CALLS), usual.backward_s(CALLS, CALLS)
    forward = limit(measured.forward_s, forward_s) / forward_s
    backward = limit(measured.backward_s, backward_s) / backward_s
    return replace(
        usual,
        region_forward_s=usual.region_forward_s * forward,
        call_forward_s=usual.call_forward_s * forward,
        region_backward_s=usual.region_backward_s * backward,
        call_backward_s=usual.call_backward_s * backward,
    )


def _add(known: Mapping[str, Overhead], way: str, measured: Times) -> Overhead:
    """What a way costs if it sends something: as much as without, and for each region what was measured beyond that."""
    plain, sending = USUAL[way], USUAL[name_overhead(way, sends=True)]
    forward_s = limit(measured.forward_s, sending.region_forward_s - plain.region_forward_s)
    backward_s = limit(measured.backward_s, sending.region_backward_s - plain.region_backward_s)
    return replace(
        known[way],
        region_forward_s=known[way].region_forward_s + forward_s,
        region_backward_s=known[way].region_backward_s + backward_s,
    )
