"""What contenders took, side by side: for each the part of activations, the cost over plain, and ours at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from recollect._bench.results import Figure, Measured

OURS = "recollect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A contender beside the plain step and beside ours.

    Attributes:
        figure: what it took.
        share: of what the plain step takes beyond what is held all the time; None without figures.
        cost: how much longer its step is than the plain one, as a part of that.
        ours: the same of the quickest of ours that takes no more memory; None if there is none.
    """

    figure: Figure
    share: float | None = None
    cost: float | None = None
    ours: float | None = None

    @property
    def is_rival(self) -> bool:
        """Whether it is neither ours nor the plain step, and has figures."""
        return self.figure.family != OURS and self.figure.contender != "plain" and self.cost is not None

    @property
    def is_lost(self) -> bool:
        """Whether ours is slower than it at its peak, or does not reach that."""
        return self.is_rival and self.cost is not None and (self.ours is None or self.ours > self.cost)


def compare(measured: Measured) -> list[Row]:
    """The rows of a cell, in the order in which they were measured; only names where nothing was."""
    plain = measured.plain
    if plain is None or plain.median_s is None:
        return [Row(figure=one) for one in measured.figures]
    mine = [one for one in measured.figures if one.family == OURS and one.median_s is not None]
    rows = []
    for one in measured.figures:
        if one.median_s is None:
            rows.append(Row(figure=one))
            continue
        share = ours = None
        if one.peak_bytes is not None and plain.peak_bytes is not None:
            span = max(1, plain.peak_bytes - measured.held_bytes)
            share = (one.peak_bytes - measured.held_bytes) / span
            within = [
                other.median_s / plain.median_s - 1
                for other in [plain, *mine]
                if other.median_s is not None and (other.peak_bytes or 0) <= one.peak_bytes
            ]
            ours = min(within, default=None)
        rows.append(Row(figure=one, share=share, cost=one.median_s / plain.median_s - 1, ours=ours))
    return rows
