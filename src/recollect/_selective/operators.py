"""Facts about an operator that decide how it can be kept; looked up once for each operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.ops import op_name
from recollect._core.torch_private.pytree import tree_leaves
from recollect._core.torch_private.schemas import (
    TO_COPY,
    arguments_named,
    gives_alias,
    is_random,
    written_arguments,
)

# Never kept and never counted: autograd and our own hooks call these at other times in forward than in recomputation.
_IGNORED = frozenset({"aten.detach.default", "aten.lift_fresh.default", "prim.device.default"})
_QUERIES = frozenset(
    {
        *("size", "stride", "dim", "numel", "storage_offset"),
        *("is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense"),
    }
)
UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
ROUTING = frozenset(
    {"topk", "sort", "argsort", "argmax", "argmin", "multinomial", "kthvalue", "msort", "_unique2", "unique_dim"}
)
"""Operators whose results choose, without their overloads."""
_HIDDEN_WRITERS = ("batch_norm", "instance_norm", "fake_quant")
_COLLECTIVE_SPACES = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What is known of one operator.

    Attributes:
        is_ignored: it is neither counted nor kept.
        is_unfilled: it gives memory that is yet to be filled.
        is_view: a result shares memory with an argument, so that keeping it would keep nothing new.
        writes: positions and names of the arguments it writes into.
        is_random: it draws from a generator.
        is_routing: its results choose.
        is_collective: it talks to other processes, about activations. What FSDP does to gather parameters does not
            come here: it uses c10d's own operators, which write into buffers.
        flops: counts the operations of one call, from its arguments and its result.
        hides_writes: it updates running statistics without a word in its schema.
        statistics: positions and names of the arguments it then writes into, without moving their versions.
    """

    name: str
    is_ignored: bool
    is_unfilled: bool
    is_view: bool
    writes: tuple[tuple[int, str], ...]
    is_random: bool
    is_routing: bool
    is_collective: bool
    flops: Callable[..., int] | None
    hides_writes: bool
    statistics: tuple[tuple[int, str], ...]

    @property
    def can_be_kept(self) -> bool:
        """Whether recomputation can be given its result in place of running it.

        Of the operators that write only those that fill a tensor with random numbers and give it back: the numbers are
        copied there.
        """
        if self.writes:
            return self.is_random and self.is_view and len(self.writes) == 1
        return not (self.is_ignored or self.is_view or self.is_unfilled)


@functools.cache
def operator_of(func: Any) -> Operator:
    """Look an operator up; everything that a dispatch mode can see, higher-order operators included."""
    name = op_name(func) or str(func)
    space, _, rest = name.partition(".")
    short = rest.split(".")[0]
    hides_writes = any(part in short for part in _HIDDEN_WRITERS)
    from torch.utils.flop_counter import flop_registry  # not at import: most programs never keep single operators

    return Operator(
        name=name,
        is_ignored=name in _IGNORED
        or space == "profiler"
        or (space in ("aten", "prim") and (short.startswith("sym_") or short in _QUERIES)),
        is_unfilled=space == "aten" and short in UNFILLED,
        is_view=gives_alias(func),
        writes=written_arguments(func),
        is_random=is_random(func),
        is_routing=short in ROUTING,
        is_collective=space in _COLLECTIVE_SPACES,
        flops=flop_registry.get(getattr(func, "overloadpacket", func)),
        hides_writes=hides_writes,
        statistics=arguments_named(func, "running_mean", "running_var") if hides_writes else (),
    )


def count_flops(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Operations of one call; 0 where torch's counter knows no formula for it."""
    if operator.flops is None:
        return 0
    return int(operator.flops(*args, **kwargs, out_val=result))


_HALVES = frozenset({torch.bfloat16, torch.float16})


def is_cached_cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast may have found this cast in its cache, had it stood otherwise.

    What is in that cache differs between forward and recomputation, whose inputs are leaves and are cached too: so
    such casts are neither counted nor kept.
    """
    if func is not TO_COPY or not args[0].requires_grad:
        return False
    if args[0].dtype is not torch.float32 or kwargs.get("dtype") not in _HALVES:
        return False
    depth = torch.autocast_increment_nesting() - 1  # inside its own casts autocast looks as if it were off
    torch.autocast_decrement_nesting()
    return depth > 0


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one, whose memory can be told from others'."""
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among arguments or results, lists and dicts included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found
