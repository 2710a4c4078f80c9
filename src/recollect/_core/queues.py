"""How long host and device take together: the host launches calls in order, the device runs them when they are there.

A call starts when it was launched and the device is done with those before. So the step takes longer than the busier of
the two where the host is slow in one part of it, and the device in another: what the device has waited for in forward
it does not make up in backward.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recollect._core.calls import OpCall, Storage

_READING = (
    "aten._local_scalar_dense",
    "aten.bincount",
    "aten.equal.default",
    "aten.is_nonzero",
    "aten.item",
    "aten.masked_select",
    "aten.nonzero",
    "aten.repeat_interleave.Tensor",
    "aten._unique",
    "aten.unique",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """When the two are done.

    Attributes:
        host_s: when the host is.
        wall_s: when both are.
        last_wait: the last call that the device had to wait for, by its number: what the host does before it makes the
            step longer, what it does after it need not; -1 if it never waits.
        count: how many calls there are.
    """

    host_s: float
    wall_s: float
    last_wait: int
    count: int


def queue(host_s: Sequence[float], device_s: Sequence[float], joins: Iterable[int] = ()) -> Queued:
    """Let host and device work through the calls of a step.

    Args:
        host_s: for each call, what the host takes to come to it and to launch it.
        device_s: for each call, what the device takes to run it.
        joins: the calls at which the host waits for what the device gives, in order; see `find_joins`.

    >>> queue([3.0, 3.0, 2.0], [1.0, 1.0, 8.0])  # all three are launched, then the last one runs
    Queued(host_s=8.0, wall_s=16.0, last_wait=2, count=3)
    """
    host, device, last_wait, first = 0.0, 0.0, -1, 0
    for join in (*joins, len(host_s) - 1):
        stop = join + 1
        launched = list(itertools.accumulate(host_s[first:stop], initial=host))[1:]
        before = list(itertools.accumulate(device_s[first:stop], initial=0.0))
        if launched:
            leads = list(map(operator.sub, launched, before))
            most = max(leads)
            if most > device:
                last_wait, device = first + leads.index(most), most
            device += before[-1]
            host = launched[-1]
        if stop < len(host_s):
            host = max(host, device)
        first = stop
    return Queued(host_s=host, wall_s=max(host, device), last_wait=last_wait, count=len(host_s))


def find_joins(calls: Sequence[OpCall], storages: Sequence[Storage]) -> tuple[int, ...]:
    """The calls, by their numbers, whose results the host reads from the device.

    What is on the host anyway it need not wait for, such as the counters of an optimizer.

    >>> from recollect._core.calls import Value
    >>> number = OpCall(op="aten._local_scalar_dense.default", inputs=(Value(storage=0),))
    >>> find_joins([OpCall(op="aten.mm.default"), number], [Storage(bytes=4)])
    (1,)
    >>> find_joins([number], [Storage(bytes=4, device="cpu")])
    ()
    """
    return tuple(
        number
        for number, call in enumerate(calls)
        if reads_values(call.op)
        and (not call.inputs or any(not storages[value.storage].device for value in call.inputs))
    )


def reads_values(op: str) -> bool:
    """Whether the host reads what an operator is given: a number, or how much of it there is.

    >>> reads_values("aten.nonzero.default"), reads_values("aten.mm.default")
    (True, False)
    """
    return op.startswith(_READING)
