"""What is decided, and where: the three decisions, and the site of a value. No torch here: operators are strings."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Decision(enum.Enum):
    """What happens to a value between forward and backward.

    Attributes:
        SAVE: it stays in memory.
        RECOMPUTE: it is dropped, and computed again in backward.
        OFFLOAD: it waits in host memory or on disk.

    >>> from recollect import Decision, Site
    >>> def policy(site):
    ...     return Decision.SAVE if site.op == "aten.mm.default" else Decision.RECOMPUTE
    >>> policy(Site(region="block", op="aten.gelu.default"))
    <Decision.RECOMPUTE: 'recompute'>
    """

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
        module: path of the module that calls it, relative to the region's own module; ``""`` for that module itself and
            outside of any module.
        scopes: names of the `recollect.region` blocks around it inside the region, outermost first.
        shape: shape of the value; ``()`` if it is not a tensor.
        dtype: as torch writes it without its prefix: ``"bfloat16"``.
        bytes: size of the value.
        flops: operations of the whole operator call.
        is_random: whether the operator draws random numbers.
        is_routing: whether the value is a choice (topk, sort, argmax, multinomial), or is counted from one.
        is_collective: whether the operator communicates with other processes.

    >>> from recollect import Site
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
        """Operations to recompute the value, per byte that this frees; 0 for an empty value."""
        return self.flops / self.bytes if self.bytes else 0.0
