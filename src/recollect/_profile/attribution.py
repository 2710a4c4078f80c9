"""What each call costs in a step that runs without the profiler.

A watched step shows how long the device takes for each operator, and how long the host takes to call it, without what
the host does in between. The step, run again unwatched, shows how long all of it takes. Here the second is shared out
by the first: calls cost the host what makes its time come out, and the device what makes the step's time come out if
the two work as `recollect._core.queues` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recollect._core.queues import Queued, queue

_WAITS = 1.02
"""A device works to the end if it is done this much later than the host."""
_BETWEEN_FORWARD = 3.0
"""What the host does before a call of forward, where modules are, as a multiple of what it does before others.

Where nobody measured how much of the host's time was backward.
"""
_HALVINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one call costs.

    Attributes:
        device_s: how long it runs.
        host_s: how long the host takes to come to it and to launch it; None where the host runs it.
        is_forward: whether it is of forward.
        is_optimizer: whether it is of an optimizer's step.
        is_read: whether the host waits for what it gives.
    """

    device_s: float
    host_s: float | None = None
    is_forward: bool = False
    is_optimizer: bool = False
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """How long a part of a step takes, unwatched.

    Attributes:
        wall_s: until the device was done.
        host_s: until the host was.
        backward_s: what of the host's time was backward; None if nobody measured it.
    """

    wall_s: float
    host_s: float
    backward_s: float | None = None


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
    """What each call adds to the step: its part of the one, host or device, that is busy for longer.

    Where one waits for the other now and then, the step takes longer than that, and so do the parts.
    """
    host_s = sum(cost.host_s or 0.0 for cost in costs)
    device_s = sum(cost.device_s for cost in costs)
    if host_s == 0.0:
        return [cost.device_s for cost in costs]
    more = _queue(costs).wall_s / max(host_s, device_s)
    return [((cost.host_s or 0.0) if host_s > device_s else cost.device_s) * more for cost in costs]


def _queue(costs: Sequence[Cost], *, device: float = 1.0, host: float = 1.0) -> Queued:
    """How long they take together, the device's times and the host's by a factor."""
    joins = [number for number, cost in enumerate(costs) if cost.is_read]
    host_s, device_s = [(cost.host_s or 0.0) * host for cost in costs], [cost.device_s * device for cost in costs]
    return queue(host_s, device_s, joins)


def _share(costs: list[Cost], plain: Plain) -> list[Cost]:
    if all(cost.host_s is None for cost in costs):
        scale = _scale(sum(cost.device_s for cost in costs), plain.wall_s, len(costs))
        return [replace(cost, device_s=scale(cost.device_s)) for cost in costs]
    costs = _share_host(costs, plain)
    device_s = sum(cost.device_s for cost in costs)
    is_busy = plain.wall_s > _WAITS * plain.host_s
    if not device_s:
        each_s = plain.wall_s / len(costs) if is_busy else 0.0
        return [replace(cost, device_s=each_s) for cost in costs]
    wanted_s = plain.wall_s if is_busy else plain.wall_s * _WAITS
    factor = _find_factor(lambda factor: _queue(costs, device=factor).wall_s, wanted_s, wanted_s / device_s)
    if not is_busy:  # then any time does that is short enough
        factor = min(factor, 1.0)
    return [replace(cost, device_s=cost.device_s * factor) for cost in costs]


def _share_host(costs: list[Cost], plain: Plain) -> list[Cost]:
    """The host's time: calls, and what lies between them. Waiting for the device does not count as time of calls."""
    shared = list(costs)
    for part, host_s in _split_host(costs, plain):
        for at, cost in zip(part, _share_between([costs[at] for at in part], host_s), strict=True):
            shared[at] = cost
    if not any(cost.is_read for cost in costs):
        return shared
    factor = _find_factor(lambda factor: _queue(shared, host=factor).host_s, plain.host_s, 1.0)
    return [replace(cost, host_s=(cost.host_s or 0.0) * factor) for cost in shared]


def _split_host(costs: list[Cost], plain: Plain) -> list[tuple[list[int], float]]:
    """Which calls share which of the host's time: those of backward theirs, if that was measured."""
    backward = [at for at, cost in enumerate(costs) if not (cost.is_forward or cost.is_optimizer)]
    others = [at for at, cost in enumerate(costs) if cost.is_forward or cost.is_optimizer]
    if plain.backward_s is None or not backward or not others:
        return [(list(range(len(costs))), plain.host_s)]
    return [(others, plain.host_s - plain.backward_s), (backward, plain.backward_s)]


def _share_between(costs: list[Cost], host_s: float) -> list[Cost]:
    called_s = sum(cost.host_s or 0.0 for cost in costs)
    if called_s > host_s:
        shrink = _scale(called_s, host_s, len(costs))
        return [replace(cost, host_s=shrink(cost.host_s or 0.0)) for cost in costs]
    parts = [_BETWEEN_FORWARD if cost.is_forward else 1.0 for cost in costs]
    each_s = (host_s - called_s) / sum(parts)
    return [replace(cost, host_s=(cost.host_s or 0.0) + each_s * part) for cost, part in zip(costs, parts, strict=True)]


def _find_factor(measure: Callable[[float], float], wanted_s: float, most: float) -> float:
    """The largest factor, up to one at which it is too large, with which a time that grows with it is not too long."""
    low, high = 0.0, most
    if measure(high) <= wanted_s:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) <= wanted_s else (low, middle)
    return low


def _scale(now_s: float, wanted_s: float, count: int) -> Callable[[float], float]:
    if not now_s:
        return lambda _: wanted_s / count
    return lambda seconds: seconds * (wanted_s / now_s)
