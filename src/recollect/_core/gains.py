"""Gain: what recomputing a module would free, and what that costs. Plain data; no torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a step gains where a module, or several of the same kind, are recomputed in backward.

    Attributes:
        path: of the module; ``"layers.*"`` for all modules of the same kind there.
        kind: the name of its class.
        count: how many modules that are.
        every: 2 if only the first, third and so on of these modules are recomputed.
        policy: what is recomputed of each: ``"full"``, or a policy by the word that `recollect.apply` knows it by.
        freed_bytes: how much less is held between forward and backward. What must be held instead, as inputs that
            nobody saved, is already taken off.
        peak_bytes: the step's peak if this were recomputed; that of the profile if the peak is elsewhere.
        recompute_s: how much longer the step takes; None if its calls have no times.
        recompute_flops: floating-point operations that are run again.
    """

    path: str
    kind: str
    count: int = 1
    every: int = 1
    policy: str = "full"
    freed_bytes: int
    peak_bytes: int
    recompute_s: float | None
    recompute_flops: int

    @property
    def price(self) -> float:
        """Seconds per byte that is freed; floating-point operations per byte where there are no times.

        >>> Gain(path="mlp", kind="MLP", freed_bytes=10, peak_bytes=90, recompute_s=0.5, recompute_flops=200).price
        0.05
        """
        cost = self.recompute_flops if self.recompute_s is None else self.recompute_s
        return cost / self.freed_bytes
