"""What a plan may do beyond keeping and recomputing values, by name. Plain data; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

CHUNKED_LOSS, CHUNKED_MLP, MICRO_BATCHES = "chunked_loss", "chunked_mlp", "micro_batches"
LEVERS = (CHUNKED_LOSS, CHUNKED_MLP, MICRO_BATCHES)
"""All of them, those that cost least first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLever:
    """A lever that a plan uses.

    Attributes:
        name: one of ``"chunked_loss"``, ``"chunked_mlp"`` and ``"micro_batches"``.
        paths: the modules that it is for; none for ``"micro_batches"``.
        parts: into how many parts rows, tokens or the batch are cut; 0 if that is left to each call.

    >>> print(PlannedLever(name="chunked_mlp", paths=("layers.0.mlp", "layers.1.mlp"), parts=4))
    chunked_mlp: layers.0.mlp and 1 more, 4 chunks
    """

    name: str
    paths: tuple[str, ...] = ()
    parts: int = 0

    def __str__(self) -> str:
        """The lever in a few words."""
        if self.name == MICRO_BATCHES:
            return f"{self.name}: {self.parts} to a batch"
        where = self.paths[0] if self.paths else "no module"
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.name}: {where}{more}" + (f", {self.parts} chunks" if self.parts else "")
