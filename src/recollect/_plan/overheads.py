"""What the host does for a region beyond making its calls: data, measured where a plan is made or taken as usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What one way of getting values back costs the host.

    Attributes:
        region_s: per region, however small.
        forward_s: per call of torch in forward.
        again_s: per call that is made again, beyond the call itself.
        random_s: likewise, in addition, per call that draws random numbers.
    """

    region_s: float
    forward_s: float
    again_s: float
    random_s: float = 0.0

    def seconds(self, calls: int, again: int, draws: int = 0) -> float:
        """For a region of so many calls of torch, of which so many are made again, and so many of these draw.

        >>> USUAL["replay"].seconds(calls=30, again=5) > USUAL["rerun"].seconds(calls=30, again=30)
        True
        """
        return self.region_s + calls * self.forward_s + again * self.again_s + draws * self.random_s


USUAL: Mapping[str, Overhead] = {
    "rerun": Overhead(region_s=80e-6, forward_s=1.5e-6, again_s=0.0),
    "serve": Overhead(region_s=210e-6, forward_s=2e-6, again_s=4e-6),
    "replay": Overhead(region_s=150e-6, forward_s=2e-6, again_s=3.5e-6, random_s=30e-6),
    "offload": Overhead(region_s=60e-6, forward_s=4e-6, again_s=0.0),
}
"""By way: what `recollect._fit.overheads` finds on a CPU of 2024; offload is from benchmarks/offload.py."""
