"""How long the host takes to come to a call and to launch it: measured on the host that is here, else a typical one's.

A step of small kernels takes as long as its host does, whatever the device. Counted are calls that launch a kernel and
calls that make a view, in forward with the modules around them, in backward without.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
from torch import nn

from recollect._core.calls import OpCall, Phase
from recollect._core.torch_private.ambient import without_function_modes
from recollect._core.torch_private.dispatch import without_dispatch_modes

_VIEW = 0.3
"""What a view takes of what a kernel takes."""
_TENSOR_S = 1e-6
"""What an operator on lists of tensors takes for each."""
_BLOCKS, _WIDTH, _RUNS = 24, 64, 5
_FORWARD_CALLS = _BLOCKS * (3 + 1 * _VIEW)  # addmm, gelu, layer norm; a view of the weight
_BACKWARD_CALLS = _BLOCKS * (5 + 5 * _VIEW)  # of layer norm, of gelu, two products and a sum; views


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What the host takes for a call that launches a kernel.

    Attributes:
        forward_s: in forward, modules and autograd included.
        backward_s: in backward.
    """

    forward_s: float = 14e-6
    backward_s: float = 9e-6

    def estimate_s(self, call: OpCall, *, launches: bool) -> float:
        """What it takes for a call, which launches a kernel or makes a view."""
        each_s = self.forward_s if call.phase in (Phase.FORWARD, Phase.RECOMPUTATION) else self.backward_s
        listed_s = _TENSOR_S * len(call.inputs) if call.op.startswith("aten._foreach") else 0.0
        return each_s * (1.0 if launches else _VIEW) + listed_s


TYPICAL = HostCosts()


@functools.lru_cache(maxsize=8)
def measure_host(device: str) -> HostCosts:
    """What the host here takes, found out on a device that is here, in some tens of milliseconds.

    Whatever surrounds the caller plays no part in it: modes that make tensors fake or of another device, autocast.
    """
    as_it_is = torch.autocast(torch.device(device).type, enabled=False)
    with torch.random.fork_rng(), torch.enable_grad(), as_it_is, without_function_modes(), without_dispatch_modes():
        blocks = [part for _ in range(_BLOCKS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH))]
        model = nn.Sequential(*blocks).to(device)
        x = torch.zeros(1, _WIDTH, device=device, requires_grad=True)
        found = [_time_once(model, x, device) for _ in range(_RUNS)]
    return HostCosts(
        forward_s=min(forward_s for forward_s, _ in found) / _FORWARD_CALLS,
        backward_s=min(backward_s for _, backward_s in found) / _BACKWARD_CALLS,
    )


def _time_once(model: nn.Module, x: torch.Tensor, device: str) -> tuple[float, float]:
    model.zero_grad()
    torch.accelerator.synchronize(device)
    started = time.perf_counter()
    loss = model(x).sum()
    between = time.perf_counter()
    loss.backward()
    return between - started, time.perf_counter() - between
