"""What the host does for a region beyond making its calls: data, measured where a plan is made or taken as usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What one way of getting values back costs the host.

    Attributes:
        region_forward_s: in forward, per region, however small.
        call_forward_s: in forward, per call of torch.
        random_forward_s: likewise, in addition, per call that draws random numbers.
        region_backward_s: in backward, per region.
        call_backward_s: in backward, per call of torch, made again or not: values that it saved are asked for.
        again_s: in backward, per call that is made again, beyond the call itself.
        random_again_s: likewise, in addition, per call that draws random numbers.
        value_forward_s: in forward, per value that is sent away: it is packed, its copy begins, its memory is let go.
        value_backward_s: in backward, per such value: its way back begins, the stream waits for it, it is handed over.
    """

    region_forward_s: float
    call_forward_s: float
    region_backward_s: float
    call_backward_s: float = 0.0
    again_s: float = 0.0
    random_forward_s: float = 0.0
    random_again_s: float = 0.0
    value_forward_s: float = 0.0
    value_backward_s: float = 0.0

    def forward_s(self, calls: int, draws: int = 0, values: int = 0) -> float:
        """In forward, for a region of so many calls of torch, of which so many draw, that sends so many values."""
        own_s = self.region_forward_s + calls * self.call_forward_s
        return own_s + draws * self.random_forward_s + values * self.value_forward_s

    def backward_s(self, calls: int, again: int, draws: int = 0, values: int = 0) -> float:
        """In backward, for a region of so many calls, of which so many are made again, and so many of these draw.

        Args:
            calls: of torch, in all.
            again: that are made again.
            draws: of these, that draw.
            values: that come back from where they were sent.

        >>> USUAL["replay"].backward_s(calls=30, again=5) < USUAL["replay"].backward_s(calls=30, again=30)
        True
        """
        made_s = again * self.again_s + draws * self.random_again_s
        return self.region_backward_s + calls * self.call_backward_s + made_s + values * self.value_backward_s


def name_overhead(way: str, *, sends: bool) -> str:
    """The name of what a way costs: regions that send something away cost more, and some of them run another way.

    >>> name_overhead("serve", sends=True), name_overhead("offload", sends=True)
    ('serve, sending', 'offload')
    """
    return f"{way}, sending" if sends and way != _OFFLOAD else way


_OFFLOAD = "offload"

_RERUN = Overhead(region_forward_s=65e-6, call_forward_s=3e-6, region_backward_s=45e-6, call_backward_s=7e-6)
_SERVE = Overhead(region_forward_s=120e-6, call_forward_s=6.5e-6, region_backward_s=85e-6, call_backward_s=9.5e-6)
_REPLAY = Overhead(
    region_forward_s=85e-6,
    call_forward_s=14e-6,
    region_backward_s=30e-6,
    call_backward_s=10e-6,
    again_s=1.5e-6,
    random_forward_s=60e-6,
    random_again_s=35e-6,
)
_VALUE = {"value_forward_s": 28e-6, "value_backward_s": 25e-6}

USUAL: Mapping[str, Overhead] = {
    "rerun": _RERUN,
    "serve": _SERVE,
    "replay": _REPLAY,
    "offload": Overhead(
        region_forward_s=40e-6, call_forward_s=5e-6, region_backward_s=8e-6, call_backward_s=1.5e-6, **_VALUE
    ),
    "rerun, sending": replace(_RERUN, region_forward_s=135e-6, region_backward_s=75e-6, **_VALUE),
    "serve, sending": Overhead(
        region_forward_s=220e-6, call_forward_s=13e-6, region_backward_s=160e-6, call_backward_s=13e-6, **_VALUE
    ),
    "replay, sending": replace(_REPLAY, region_forward_s=145e-6, region_backward_s=65e-6, **_VALUE),
}
"""By way: what `recollect._fit.overheads` and `recollect._fit.sending` find on a CPU of 2024.

What each value costs is in part an estimate. Python takes 15 µs on the way out and 13 back, measured with a link that
carries nothing. The rest is what a device's driver takes for one value on its own: two events recorded, two waits, two
changes of stream, a copy launched, and on the way back memory allocated; taken to be 12 µs each way.
"""

_COUNTED = {"random_forward_s": 10e-6, "random_again_s": 6e-6}

USUAL_ON_DEVICE: Mapping[str, Overhead] = {
    **USUAL,
    **{way: replace(USUAL[way], **_COUNTED) for way in ("replay", "replay, sending")},
}
"""Likewise where random numbers come from a device: where its generator stands is two numbers, not a state of 5 kB."""
