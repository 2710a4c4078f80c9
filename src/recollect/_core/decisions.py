"""What is decided, and where: the three decisions, and the site of a value. No torch here: operators are strings."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Decision(enum.Enum):
    """What happens to a value between forward and backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a value is made. Policies decide by site.

    Attributes:
        region: name of the checkpointed region.
        op: the operator, overload included: ``"aten.mm.default"``.
        call: which call of this operator in the region, from 0.
        output: which of the operator's outputs, from 0.
        module: path of the module that calls it, seen from the region's own module; ``""`` for that module itself and
            outside of any module.
        scopes: names of the `recollect.region` blocks around it inside the region, outermost first.
        shape: of the value; ``()`` for one that is not a tensor.
        dtype: as torch writes it without its prefix: ``"bfloat16"``.
        bytes: of the value's elements.
        flops: of the whole operator call.
        is_random: whether the operator draws random numbers.
        is_routing: whether the value chooses (topk, sort, argmax, multinomial), or is counted from such a choice.
        is_collective: whether the operator communicates with other processes.

    >>> Site(region="block", op="aten.mm.default", shape=(8, 16), dtype="float32", bytes=512, flops=4096).flops_per_byte
    8.0
    """

    region: str
    op: str
    call: int = 0
    output: int = 0
    module: str = ""
    scopes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0
    flops: int = 0
    is_random: bool = False
    is_routing: bool = False
    is_collective: bool = False

    @property
    def flops_per_byte(self) -> float:
        """What recomputing costs for what it frees; 0 for an empty value."""
        return self.flops / self.bytes if self.bytes else 0.0
