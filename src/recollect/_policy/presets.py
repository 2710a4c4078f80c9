"""Policies that users know by a word, for any model."""

from __future__ import annotations

from collections import Counter
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

    def judge(self, site: Site) -> Verdict | None:
        """As the policy."""
        verdict = self.policy.judge(site)
        self.tally.note(site, is_kept=verdict is not None and verdict.decision is not Decision.RECOMPUTE)
        return verdict

    def __repr__(self) -> str:
        return self.word


def selective() -> ReadyMade:
    """Keeps attention, every second matrix product and convolutions; with a tally of its own.

    A convolution's result is what the norm after it saves anyway, and the most expensive value to make again.
    """
    products = save_every(("aten.mm.default", "aten.addmm.default"), 2)
    return ReadyMade("selective", first_match(save_attention, products, save_ops("aten.convolution.default")))
