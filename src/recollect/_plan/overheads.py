"""What the host does for a region beyond making its calls: data, measured where a plan is made or taken as usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    """

    region_forward_s: float
    call_forward_s: float
    region_backward_s: float
    call_backward_s: float = 0.0
    again_s: float = 0.0
    random_forward_s: float = 0.0
    random_again_s: float = 0.0

    def forward_s(self, calls: int, draws: int = 0) -> float:
        """In forward, for a region of so many calls of torch, of which so many draw."""
        return self.region_forward_s + calls * self.call_forward_s + draws * self.random_forward_s

    def backward_s(self, calls: int, again: int, draws: int = 0) -> float:
        """In backward, for a region of so many calls, of which so many are made again, and so many of these draw.

        >>> USUAL["replay"].backward_s(calls=30, again=5) < USUAL["replay"].backward_s(calls=30, again=30)
        True
        """
        made_s = again * self.again_s + draws * self.random_again_s
        return self.region_backward_s + calls * self.call_backward_s + made_s


USUAL: Mapping[str, Overhead] = {
    "rerun": Overhead(region_forward_s=65e-6, call_forward_s=3e-6, region_backward_s=45e-6, call_backward_s=7e-6),
    "serve": Overhead(region_forward_s=120e-6, call_forward_s=6.5e-6, region_backward_s=85e-6, call_backward_s=9.5e-6),
    "replay": Overhead(
        region_forward_s=85e-6,
        call_forward_s=14e-6,
        region_backward_s=30e-6,
        call_backward_s=10e-6,
        again_s=1.5e-6,
        random_forward_s=60e-6,
        random_again_s=35e-6,
    ),
    "offload": Overhead(region_forward_s=30e-6, call_forward_s=4e-6, region_backward_s=30e-6),
}
"""By way: what `recollect._fit.overheads` finds on a CPU of 2024; offload is from benchmarks/offload.py."""
