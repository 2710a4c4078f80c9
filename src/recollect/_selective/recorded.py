"""What a recording consists of: the calls of torch that a forward made, and the tensors that these saved."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from recollect._selective.kept_call import States, has_same_bits
from recollect._selective.outlines import Outline, TensorDigest
from recollect._selective.program import NOWHERE, Cast, Listed, Numbered


class RecordedCall:
    """One call of torch."""

    __slots__ = (
        *("args", "bump", "copies", "func", "is_kept", "is_single", "kwargs", "links", "needs_grad"),
        *("outs", "place", "saved", "states", "statistics", "written"),
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.args: list[Any] = []
        self.copies: list[tuple[Tensor, ref[Any]]] = []  # what was cast or copied inside, and the memory of what came
        self.kwargs: dict[str, Any] = {}
        self.links: list[int] = []
        self.needs_grad: list[bool] = []  # of each link: what a custom Function gives begins to require it afterwards
        self.outs: list[int] = []
        self.is_kept = False  # whether a policy keeps some of what ran beneath
        self.is_single = True
        self.place = ""
        self.saved = 0
        self.states: States = []
        self.written, self.bump = NOWHERE, 0  # the number it overwrites, and how far that moves the version
        self.statistics: frozenset[int] = frozenset()  # numbers of what it updates unseen

    def is_plain(self) -> bool:
        """Whether its tensors stand on their own, and not in lists or keywords."""
        return not any(isinstance(value, Listed) for value in self.args) and not any(
            isinstance(value, (Numbered, Listed)) for value in self.kwargs.values()
        )


class SavedTensor(NamedTuple):
    """One saved tensor.

    Attributes:
        tensor: itself if it is held, else its outline.
        owner: the call that saved it; None if none did.
        place: which of that call's saved tensors it is.
        base: its number, or that of the argument or result of the call that it is a view of; None if the call made it
            inside.
        is_base: whether it is that tensor itself.
        meta: its metadata.
        bits: its bits, if it is not held.
        cast: how its call made it of an argument, if it did.
    """

    tensor: Tensor | Outline
    owner: RecordedCall | None
    place: int
    base: int | None
    is_base: bool
    meta: tuple[Any, ...]
    bits: TensorDigest | None
    cast: Cast | None

    def has_bits_of(self, value: Tensor) -> bool:
        """Whether another tensor is equal to it, to the bit."""
        if isinstance(self.tensor, Tensor):
            return has_same_bits(value, self.tensor)
        return self.bits is not None and self.bits.are_of(value)
