"""Policies that users know by a word, for any model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from recollect._core.decisions import Decision, Site
from recollect._policy.base import Policy, Verdict
from recollect._policy.combine import first_match
from recollect._policy.rules import save_attention, save_every, save_ops


class Tally:
    """What a policy was asked and kept, so far.

    Attributes:
        kept: how many values it kept.
        is_reported: whether its user was told that it keeps nothing.
    """

    def __init__(self) -> None:
        self.kept = 0
        self.is_reported = False
        self._flops: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def note(self, site: Site, *, is_kept: bool) -> None:
        """It was asked about a value."""
        self.kept += is_kept
        self._flops[site.op] += site.flops
        self._bytes[site.op] += site.bytes

    @property
    def keeps_nothing(self) -> bool:
        """Whether it was asked, and kept nothing."""
        return bool(self._flops) and not self.kept

    def most_expensive(self) -> str | None:
        """The operator that costs most to run again; without figures for it, the one that gives most bytes."""
        counts = self._flops if any(self._flops.values()) else self._bytes
        return max(counts, key=counts.__getitem__, default=None)


@dataclass(frozen=True, slots=True, repr=False)
class ReadyMade(Policy):
    """A policy known by a word: a part of it that matches nothing in some model is not its user's mistake."""

    word: str
    policy: Policy
    tally: Tally = field(default_factory=Tally, compare=False)

    def suited(self, names: Iterable[str]) -> ReadyMade:
        """The same for a region of which the classes of its modules are known, or its operators; one tally for both."""
        return self if self.word != "selective" or _holds_inputs(names) else selective(self.tally, holds_inputs=False)

    def judge(self, site: Site) -> Verdict | None:
        """As the policy."""
        verdict = self.policy.judge(site)
        self.tally.note(site, is_kept=verdict is not None and verdict.decision is not Decision.RECOMPUTE)
        return verdict

    def __repr__(self) -> str:
        return self.word


_CONVOLUTION = "aten.convolution.default"
# Backward of these takes what they were given; that of a plain ReLU, sigmoid or tanh takes what they gave.
_HOLDING = re.compile(r"norm|gelu|silu|swish|mish|leakyrelu|prelu|relu6|hardtanh|softplus|hardsigmoid|(?<![rg])elu")


def selective(tally: Tally | None = None, *, holds_inputs: bool = True) -> ReadyMade:
    """Keeps attention, every second matrix product and convolutions.

    A convolution's result is what the norm after it saves anyway, and the most expensive value to make again. Without
    such a norm or activation nobody saves it, and a region of n convolutions saves n values in all: its input and all
    results are more than that. So the first two are made again there, and every second of the others is kept.

    Args:
        tally: a new one by default.
        holds_inputs: whether the region has modules of which backward takes what they were given.
    """
    products = save_every(("aten.mm.default", "aten.addmm.default"), 2)
    convolutions = save_ops(_CONVOLUTION) if holds_inputs else save_every(_CONVOLUTION, 2, start=2)
    return ReadyMade("selective", first_match(save_attention, products, convolutions), tally or Tally())


def _holds_inputs(names: Iterable[str]) -> bool:
    return any(_HOLDING.search(name.lower().replace("_", "")) for name in names)
