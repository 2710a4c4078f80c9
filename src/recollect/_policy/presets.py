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
        """The same for a region whose layers' classes, or whose operators, are known; both share one tally."""
        if self.word != "selective":
            return self
        counts = Counter(kind for name in names if (found := _KINDS.search(_plain(name))) and (kind := found.lastgroup))
        if counts["holder"] >= _ENOUGH:
            return self
        return selective(self.tally, holds_little=True, has_one_product=counts["product"] == 1)

    @property
    def keeps_what_pays(self) -> bool:
        """Of those that are known by a word, one is chosen for its time."""
        return self.word == "selective"

    def judge(self, site: Site) -> Verdict | None:
        """As the policy."""
        verdict = self.policy.judge(site)
        self.tally.note(site, is_kept=verdict is not None and verdict.decision is not Decision.RECOMPUTE)
        return verdict

    def __repr__(self) -> str:
        return self.word


_CONVOLUTION = "aten.convolution.default"
# Backward of holders takes what they were given; that of a plain ReLU, sigmoid or tanh takes what they gave.
_KINDS = re.compile(
    r"(?P<holder>norm|gelu|silu|swish|mish|leakyrelu|prelu|relu6|hardtanh|softplus|hardsigmoid|(?<![rg])elu)"
    r"|(?P<product>linear|addmm|(?<!b)mm)"
)
_ENOUGH = 2  # holders, see below


def is_telling(name: str) -> bool:
    """Whether the name of a layer, function or operator tells what "selective" looks for.

    >>> is_telling("BatchNorm2d"), is_telling("silu"), is_telling("Attention")
    (True, True, False)
    """
    return _KINDS.search(_plain(name)) is not None


def selective(tally: Tally | None = None, *, holds_little: bool = False, has_one_product: bool = False) -> ReadyMade:
    """Keeps attention, every second matrix product and convolutions.

    A convolution's result is what the norm after it saves anyway, and the most expensive value to make again. A plain
    region of n products and h holders (norms and activations that save what they are given) saves n + h values. With
    all products kept it holds n, and its input. So where h is less than 2, the first two convolutions are made again
    and every second of the others is kept, and of the matrix products a single one is not.

    Args:
        tally: a new one by default.
        holds_little: whether the region has fewer than two holders.
        has_one_product: whether it has one matrix product.
    """
    products = save_every(("aten.mm.default", "aten.addmm.default"), 2, start=int(holds_little and has_one_product))
    convolutions = save_every(_CONVOLUTION, 2, start=2) if holds_little else save_ops(_CONVOLUTION)
    return ReadyMade("selective", first_match(save_attention, products, convolutions), tally or Tally())


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
