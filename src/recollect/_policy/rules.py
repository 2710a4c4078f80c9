"""Rules that go by what a site itself says: its operator, its numbers, its marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recollect._core.decisions import Decision, Site
from recollect._core.units import exact_bytes, parse_bytes
from recollect._policy.base import Policy, Verdict
from recollect._policy.ops import Op, OpLike, parse_ops
from recollect._policy.predicates import Predicate, as_predicate


class Rule(Policy):
    """A policy that saves what it matches, leaves the rest to others, and is named by its own repr."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The one rule."""
        return (repr(self),)

    def matches(self, site: Site) -> bool:
        """Whether the value is saved."""
        raise NotImplementedError

    def judge(self, site: Site) -> Verdict | None:
        """Save what matches."""
        return Verdict(Decision.SAVE, by=repr(self)) if self.matches(site) else None


@dataclass(frozen=True, slots=True, repr=False)
class SaveNothing(Policy):
    """Saves nothing: every value is recomputed."""

    def judge(self, site: Site) -> Verdict | None:
        """Nothing."""
        del site
        return None

    def __repr__(self) -> str:
        return "save_nothing"


@dataclass(frozen=True, slots=True, repr=False)
class SaveAll(Rule):
    """Saves every value."""

    @property
    def answers_all(self) -> bool:
        """Nothing is left to others."""
        return True

    def matches(self, site: Site) -> bool:
        """Always."""
        del site
        return True

    def __repr__(self) -> str:
        return "save_all"


@dataclass(frozen=True, slots=True, repr=False)
class SaveOps(Rule):
    """Saves the results of certain operators.

    `save_matmuls` has those of matrix products, `save_attention` those of attention kernels; both print as one word.
    """

    ops: tuple[Op, ...]
    word: str = ""

    @property
    def functions(self) -> tuple[type, ...]:
        """Those among the operators."""
        return _functions(self.ops)

    def matches(self, site: Site) -> bool:
        """By the operator's name."""
        return any(op.name == site.op for op in self.ops)

    def __repr__(self) -> str:
        return self.word or f"save_ops({', '.join(map(repr, self.ops))})"


@dataclass(frozen=True, slots=True, repr=False)
class SaveEvery(Rule):
    """Saves every n-th call of an operator, from the first or a later one; each operator has its own count."""

    ops: tuple[Op, ...]
    n: int
    start: int = 0

    @property
    def functions(self) -> tuple[type, ...]:
        """Those among the operators."""
        return _functions(self.ops)

    def matches(self, site: Site) -> bool:
        """By the operator's name and the number of its call."""
        after = site.call - self.start
        return after >= 0 and after % self.n == 0 and any(op.name == site.op for op in self.ops)

    def __repr__(self) -> str:
        start = f", start={self.start}" if self.start else ""
        return f"save_every({self.ops[0] if len(self.ops) == 1 else self.ops!r}, {self.n}{start})"


@dataclass(frozen=True, slots=True, repr=False)
class SaveLargerThan(Rule):
    """Saves values larger than a number of bytes."""

    size_bytes: int

    def matches(self, site: Site) -> bool:
        """By the value's bytes."""
        return site.bytes > self.size_bytes

    def __repr__(self) -> str:
        return f"save_larger_than({exact_bytes(self.size_bytes)!r})"


@dataclass(frozen=True, slots=True, repr=False)
class SaveIf(Rule):
    """Saves values for which a predicate holds."""

    predicate: Predicate

    def matches(self, site: Site) -> bool:
        """By the predicate."""
        return self.predicate(site)

    def __repr__(self) -> str:
        return f"save_if({self.predicate})"


@dataclass(frozen=True, slots=True, repr=False)
class SaveMarked(Rule):
    """Saves values of one kind.

    `save_random`: random values, such as dropout masks. `save_routing`: choices (topk, sort, argmax, multinomial) and
    the counts made from them. `save_collectives`: values that come from other processes.
    """

    word: str
    mark: str

    def matches(self, site: Site) -> bool:
        """By the mark."""
        marked: bool = getattr(site, self.mark)
        return marked

    def __repr__(self) -> str:
        return self.word


def _functions(ops: tuple[Op, ...]) -> tuple[type, ...]:
    return tuple(op.function for op in ops if op.function is not None)


def _named(word: str, *names: str) -> SaveOps:
    """A set of ours. A name that this torch does not have, or that no imported package registers, matches nothing."""
    return SaveOps(tuple(map(Op, names)), word)


save_nothing = SaveNothing()
"""Save nothing: every value is recomputed."""

save_all = SaveAll()
"""Save every value: nothing is recomputed."""

save_matmuls = _named(
    "save_matmuls",
    "aten.mm.default",
    "aten.mm.dtype",
    "aten.addmm.default",
    "aten.addmm.dtype",
    "aten._addmm_activation.default",
    "aten.bmm.default",
    "aten.bmm.dtype",
    "aten.baddbmm.default",
    "aten.baddbmm.dtype",
    "aten.addbmm.default",
    "aten.matmul.default",
    "aten.linear.default",
    "aten._grouped_mm.default",
    "aten._int_mm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_grouped_mm_v2.default",
    "aten._weight_int4pack_mm.default",
    "aten._weight_int8pack_mm.default",
    "aten._sparse_semi_structured_mm.default",
    "aten._sparse_semi_structured_addmm.default",
    "aten._sparse_semi_structured_linear.default",
)
"""Save what matrix products make: mm, addmm, bmm, baddbmm, linear, their scaled, grouped and quantised forms.

Convolutions are not among them.
"""

save_attention = _named(
    "save_attention",
    "aten.scaled_dot_product_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention.quantized",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_attention_math_for_mps.default",
    "aten._flash_attention_forward.default",
    "aten._flash_attention_forward.quantized",
    "aten._efficient_attention_forward.default",
    "aten._cudnn_attention_forward.default",
    "torch_attn._varlen_attn.default",
    "flex_attention",
)
"""Save what attention kernels make: flash, memory-efficient, cuDNN, variable-length and flex attention.

The math implementation of `torch.nn.functional.scaled_dot_product_attention` runs as products and a softmax of its own,
not as one kernel.
"""

save_random = SaveMarked("save_random", "is_random")
"""Save what is drawn at random, such as dropout masks."""

save_routing = SaveMarked("save_routing", "is_routing")
"""Save choices (topk, sort, argmax, multinomial) and what is counted out of them."""

save_collectives = SaveMarked("save_collectives", "is_collective")
"""Save what comes from other processes."""


def save_ops(*ops: OpLike) -> Policy:
    """Save the results of operators.

    Args:
        ops: overloads (``torch.ops.aten.mm.default``) or their names (``"aten.mm.default"``, ``"aten::mm.default"``),
            higher-order operators or their names (``"flex_attention"``), operators made by `torch.library.custom_op`,
            and subclasses of `torch.autograd.Function`, which count as one operator if they are called through their
            class (``MyFunction.apply(x)``, not an ``apply`` taken from it before).

    Raises:
        ValueError: none is given, or a name belongs to no operator or to several overloads; the error lists similar
            names.
        TypeError: one is not an operator.

    >>> import torch
    >>> from recollect import policies
    >>> policies.save_ops(torch.ops.aten.mm.default, "aten.bmm.default")
    save_ops('aten.mm.default', 'aten.bmm.default')
    >>> policies.save_ops(torch.ops.aten.mm)
    Traceback (most recent call last):
    ...
    ValueError: 'aten.mm' has the overloads default, ...: write 'aten.mm.default'
    """
    if not ops:
        message = "save_ops() names no operator; to save nothing, use save_nothing"
        raise ValueError(message)
    return SaveOps(parse_ops(ops))


def save_every(op: OpLike | tuple[OpLike, ...] | list[OpLike], n: int, *, start: int = 0) -> Policy:
    """Save every n-th call of an operator in its region: the first, the one n later, and so on.

    Args:
        op: an operator as in `save_ops`, or several, each with its own count.
        n: at least 1, which saves every call.
        start: the first call to save, counted from 0.

    Raises:
        ValueError: `n` is not a whole number of at least 1 or `start` one of at least 0, or the operator has no such
            name.
        TypeError: it is not an operator.

    >>> from recollect import policies
    >>> every_second = policies.save_every("aten.mm.default", 2)
    >>> from recollect import Site
    >>> [every_second(Site(region="block", op="aten.mm.default", call=call)).value for call in range(4)]
    ['save', 'recompute', 'save', 'recompute']
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        message = f"save_every: n={n!r}: expected a whole number of at least 1"
        raise ValueError(message)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        message = f"save_every: start={start!r}: expected the number of a call, at least 0"
        raise ValueError(message)
    ops = parse_ops(op if isinstance(op, tuple | list) else (op,))
    if not ops:
        message = "save_every names no operator; to save nothing, use save_nothing"
        raise ValueError(message)
    return SaveEvery(ops, n, start)


def save_larger_than(size: int | str) -> Policy:
    """Save values larger than a number of bytes.

    Args:
        size: in bytes, or as text with a decimal or binary unit: ``"512 KB"``, ``"1MiB"``, ``"2.5GB"``.

    Raises:
        ValueError: the text is not a size, or the number is negative.
        TypeError: it is neither a whole number nor text.

    >>> from recollect import policies
    >>> policies.save_larger_than(3 * 2**20)
    save_larger_than('3MiB')
    >>> policies.save_larger_than("3MiB") == policies.save_larger_than(3 * 2**20)
    True
    """
    return SaveLargerThan(parse_bytes(size))


def save_if(predicate: Callable[[Site], bool]) -> Policy:
    """Save values for which a predicate holds.

    Args:
        predicate: a comparison of `flops`, `nbytes` or `flops_per_byte` with a bound, several of these joined by ``&``
            or ``|``, or any function from a `recollect.Site` to True or False.

    Raises:
        TypeError: it is neither; or, once a site is asked about, the function answers something else.

    >>> from recollect import policies
    >>> from recollect.policies import flops_per_byte, nbytes
    >>> policies.save_if(flops_per_byte > 100)
    save_if(flops_per_byte > 100)
    >>> policies.save_if((flops_per_byte > 100) & (nbytes <= 2**20))
    save_if((flops_per_byte > 100) & (nbytes <= 1048576))
    >>> def is_wide(site):
    ...     return site.shape[-1] > 1024
    >>> policies.save_if(is_wide)
    save_if(is_wide)
    """
    return SaveIf(as_predicate(predicate))
