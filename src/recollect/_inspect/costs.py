"""What the calls of a step cost, measured where they ran and estimated where not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recollect._core.calls import OpCall, Phase, Storage
from recollect._core.queues import find_joins
from recollect._core.torch_private.precision import has_tf32_products
from recollect._inspect.plain import PlainTimes
from recollect._profile.attribution import Cost, attribute, choose_seconds

if TYPE_CHECKING:
    from recollect._profile.dry.host import HostCosts
    from recollect._profile.dry.roofline import Device


def cost_calls(
    calls: Sequence[OpCall],
    storages: Sequence[Storage],
    device: Device | None,
    plain: PlainTimes | None,
    host_costs: HostCosts | None = None,
) -> list[OpCall]:
    """The calls with what they cost in a step that nobody watches.

    Args:
        calls: with the times of those that ran.
        storages: of the profile.
        device: to estimate the others for; None if nobody knows it.
        plain: the step's time without us, if it was measured.
        host_costs: what the host takes to launch that device's kernels; None to find it out if it is needed.
    """
    from recollect._profile.dry.roofline import estimate_host_s, estimate_s, find_host_costs  # brings much along

    matmul = "tf32" if has_tf32_products() else "float32"
    joins = set(find_joins(calls, storages))
    costs = []
    for number, call in enumerate(calls):
        device_s, host_s = call.device_s, call.host_s
        if device_s is None:
            if device is None:
                return list(calls)
            device_s = estimate_s(call, device, storages, float32_matmul=matmul)
            host_costs = host_costs or find_host_costs(device)
            host_s = estimate_host_s(call, host_costs)
        costs.append(
            Cost(
                device_s=device_s,
                host_s=host_s,
                is_forward=call.phase is Phase.FORWARD,
                is_optimizer=call.phase is Phase.OPTIMIZER,
                is_read=number in joins,
            )
        )
    if plain is not None:
        costs = attribute(costs, plain.body, plain.optimizer, is_apart=plain.is_apart)
    return [
        replace(call, seconds=seconds, device_s=cost.device_s, host_s=cost.host_s)
        for call, cost, seconds in zip(calls, costs, choose_seconds(costs), strict=True)
    ]
