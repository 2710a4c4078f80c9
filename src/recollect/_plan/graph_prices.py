"""What the calls of a graph cost a compiler that fuses what is pointwise into the kernel that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from recollect._core.calls import OpCall
from recollect._core.profiles import Profile
from recollect._plan.fusing import fuse, is_pointwise, is_view

_FLOPS_PER_S, _BYTES_PER_S = 4e14, 3e12  # of today's accelerators: what counts is how many operations weigh a byte
_FUSED = 0.05  # of the time that a pointwise kernel of its own would take, if its result is written nowhere


def price_all(profile: Profile) -> tuple[Profile, frozenset[int]]:
    """The step as a compiler will run it, with what each call costs, and the storages that are written nowhere."""
    fused, gone = fuse(profile)
    calls = (replace(call, seconds=price(call, is_written=gone.isdisjoint(_made_by(call)))) for call in fused.calls)
    return replace(fused, calls=tuple(calls)), gone


def _made_by(call: OpCall) -> Iterator[int]:
    return (value.storage for value in call.outputs)


def price(call: OpCall, *, is_written: bool = False) -> float:
    """What a call costs in seconds if a compiler makes it again in backward.

    Args:
        call: which.
        is_written: whether what it gives is written to memory, even if it is pointwise.

    >>> from recollect._core.calls import Value
    >>> x, y = Value(storage=0, shape=(1000,), bytes=4000), Value(storage=1, shape=(1000,), bytes=4000)
    >>> mul = OpCall(op="aten.mul.Tensor", inputs=(x,), outputs=(y,))
    >>> price(mul) < price(mul, is_written=True)
    True
    >>> price(OpCall(op="aten.view.default", inputs=(x,), outputs=(x,)))
    0.0
    """
    if is_view(call):
        return 0.0
    made = sum(value.bytes for value in call.outputs)
    moved = made + sum(value.bytes for value in call.inputs)
    if is_pointwise(call) and not is_written:
        return _FUSED * made / _BYTES_PER_S
    return max(call.flops / _FLOPS_PER_S, moved / _BYTES_PER_S)
