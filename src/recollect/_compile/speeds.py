"""How fast a device computes and its link carries, for graphs that send values to the host.

Nothing of the graph has run when this is asked, so kernels are estimated by the roofline, and taken to be quicker than
that: the products of a Llama took 107 ms on an H200 where it says 120, and copies planned by it held up a step of
176 ms for 19. One product is measured: a device that runs it quicker still counts as that quick. One that seems slow
may just be busy with something else, so that does not count.
"""

from __future__ import annotations

import functools
import logging
import time

import torch
from torch import distributed

from recollect._core.calls import OpCall, Value
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._plan.fusing import is_pointwise, is_view
from recollect._plan.sent_values import Carrier
from recollect._profile.dry.roofline import Device, estimate_s, find_device
from recollect._profile.links import measure_pinned

_log = logging.getLogger("recollect")

_TYPICAL = "H100"
_TYPICAL_LINK = 25e9  # bytes a second, where nothing is measured
_FUSED = 0.3  # of the time of a pointwise kernel of its own: most are a part of others
_USUAL_PACE = 0.8  # of the estimate: lower than was seen, because a late copy costs more than one that is not made
_LINK_SHARE = 0.85  # of what the link carries: a copy that is late is waited for, one that is early is not
_SIDE, _IN_A_ROW, _ROUNDS = 4096, 8, 8  # of the product, and how often it runs


def carrier_of(device: torch.device) -> Carrier:
    """Of a device that is here. Link and pace are measured once per process.

    Of several processes nothing is measured: their graphs may communicate, so all must keep and recompute the same.
    """
    is_alone = not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
    return _carrier_of(device, measures=device.type != "cpu" and is_alone)


@functools.lru_cache(maxsize=8)
def _carrier_of(device: torch.device, *, measures: bool) -> Carrier:
    try:
        known = find_device(device)
    except ValueError:  # nobody knows it
        known = find_device(_TYPICAL)
    link, pace = _TYPICAL_LINK, _USUAL_PACE
    if measures:
        with without_dispatch_modes():
            link = min((one.bytes_per_s for one in measure_pinned(device)), default=_TYPICAL_LINK)
            pace = min(pace, _measure_product_s(device) / estimate_s(_make_product(), known))
        _log.debug("%s: the link carries %.1f GB/s, kernels take %.2f of the estimate", device, link / 1e9, pace)
    return Carrier(bytes_per_s=_LINK_SHARE * link, seconds_of=functools.partial(_estimate_s, known, pace))


def _make_product() -> OpCall:
    shape = (_SIDE, _SIDE)
    first, second, result = (Value(storage=at, shape=shape, dtype="float16", bytes=2 * _SIDE**2) for at in range(3))
    return OpCall(op="aten.mm.default", inputs=(first, second), outputs=(result,), flops=2 * _SIDE**3)


def _measure_product_s(device: torch.device) -> float:
    """The best of some rounds: what disturbs one only slows it down."""
    own = torch.Generator(device).manual_seed(0)  # the step's random numbers stay where they are
    factor = torch.randn(_SIDE, _SIDE, device=device, dtype=torch.float16, generator=own)
    result = torch.empty_like(factor)
    found = float("inf")
    for _ in range(_ROUNDS):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            torch.mm(factor, factor, out=result)
        torch.accelerator.synchronize(device)
        found = min(found, (time.perf_counter() - start) / _IN_A_ROW)
    return found


def _estimate_s(device: Device, pace: float, call: OpCall) -> float:
    if is_view(call):
        return 0.0
    found = pace * (estimate_s(call, device) - device.launch_s)
    return found * _FUSED if is_pointwise(call) else found
