"""How fast a device computes and its link carries, for graphs that send values to the host."""

from __future__ import annotations

import functools
import logging

import torch

from recollect._core.calls import OpCall
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._plan.fusing import is_pointwise, is_view
from recollect._plan.sent_values import Carrier
from recollect._profile.dry.roofline import Device, estimate_s, find_device
from recollect._profile.links import measure_pinned

_log = logging.getLogger("recollect")

_TYPICAL = "H100"
_TYPICAL_LINK = 25e9  # bytes a second, where nothing can be measured
_FUSED = 0.3  # of the time of a pointwise kernel of its own: most are a part of others


@functools.lru_cache(maxsize=8)
def carrier_of(device: torch.device) -> Carrier:
    """Of a device that is here. The link is measured once per process, in about a third of a second."""
    try:
        known = find_device(device)
    except ValueError:  # nobody knows it
        known = find_device(_TYPICAL)
    return Carrier(bytes_per_s=_measure_link(device), seconds_of=functools.partial(_estimate_s, known))


def _measure_link(device: torch.device) -> float:
    if device.type == "cpu":
        return _TYPICAL_LINK
    with without_dispatch_modes():
        speeds = [link.bytes_per_s for link in measure_pinned(device)]
    found = min(speeds, default=_TYPICAL_LINK)
    _log.debug("the link between %s and the host carries %.1f GB/s", device, found / 1e9)
    return found


def _estimate_s(device: Device, call: OpCall) -> float:
    if is_view(call):
        return 0.0
    found = estimate_s(call, device) - device.launch_s
    return found * _FUSED if is_pointwise(call) else found
