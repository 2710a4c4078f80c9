"""What each call costs in a step as it runs without us.

A watched step shows how long the device takes for each operator, and how long the host takes to call it, without what
the host does in between. The step, run again unwatched, shows how long all of it takes. Here the second is shared out
by the first. Host and device work side by side, so that the larger of their sums is the step's time, and each call
costs what it takes of that: on a step that waits for launches, its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_WAITS = 1.02
"""A device works all the time if it is done this much later than the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one call costs.

    Attributes:
        device_s: how long it runs.
        host_s: how long the host takes to come to it and to launch it; None where the host runs it.
        is_optimizer: whether it is of an optimizer's step.
    """

    device_s: float
    host_s: float | None = None
    is_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """How long a part of a step takes, unwatched.

    Attributes:
        wall_s: until the device was done.
        host_s: until the host was.
    """

    wall_s: float
    host_s: float


def attribute(costs: Sequence[Cost], body: Plain, optimizer: Plain | None, *, is_apart: bool) -> list[Cost]:
    """The costs of calls in the unwatched step.

    Args:
        costs: of all calls, as they were watched or estimated.
        body: the step unwatched; if `is_apart`, without the optimizer's step.
        optimizer: that, unwatched; None if nobody measured it: its costs stay as they are.
        is_apart: whether the optimizer's step was left out of the body.

    >>> calls = [Cost(device_s=1e-6, host_s=4e-6), Cost(device_s=3e-6, host_s=4e-6)]
    >>> found = attribute(calls, Plain(wall_s=28e-6, host_s=28e-6), None, is_apart=False)
    >>> [round(cost.host_s * 1e6) for cost in found]
    [14, 14]
    """
    found = list(costs)
    steps = [at for at, cost in enumerate(costs) if cost.is_optimizer and is_apart]
    others = [at for at, cost in enumerate(costs) if not (cost.is_optimizer and is_apart)]
    for part, plain in ((others, body), (steps, optimizer)):
        if plain is not None and part:
            for at, cost in zip(part, _share([costs[at] for at in part], plain), strict=True):
                found[at] = cost
    return found


def choose_seconds(costs: Sequence[Cost]) -> list[float]:
    """What each call adds to the step: of host and device, what it takes of the one that is busy for longer."""
    host_s = sum(cost.host_s or 0.0 for cost in costs)
    device_s = sum(cost.device_s for cost in costs)
    if host_s > device_s:
        return [cost.host_s or 0.0 for cost in costs]
    return [cost.device_s for cost in costs]


def _share(costs: list[Cost], plain: Plain) -> list[Cost]:
    device_s = sum(cost.device_s for cost in costs)
    is_on_host = all(cost.host_s is None for cost in costs)
    is_busy = is_on_host or plain.wall_s > _WAITS * plain.host_s
    wanted_s = plain.wall_s if is_busy else min(plain.wall_s, device_s)
    scale: Callable[[float], float] = _scale(device_s, wanted_s, len(costs))
    costs = [replace(cost, device_s=scale(cost.device_s)) for cost in costs]
    if is_on_host:
        return costs
    called_s = sum(cost.host_s or 0.0 for cost in costs)
    if called_s > plain.host_s:
        shrink = _scale(called_s, plain.host_s, len(costs))
        return [replace(cost, host_s=shrink(cost.host_s or 0.0)) for cost in costs]
    between_s = (plain.host_s - called_s) / len(costs)
    return [replace(cost, host_s=(cost.host_s or 0.0) + between_s) for cost in costs]


def _scale(now_s: float, wanted_s: float, count: int) -> Callable[[float], float]:
    if not now_s:
        return lambda _: wanted_s / count
    return lambda seconds: seconds * (wanted_s / now_s)
