"""Facts about an operator that decide how it can be kept; looked up once for each operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.collectives import written_by_collective
from recollect._core.torch_private.dispatch import FAKES
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
_COLLECTIVE_SPACES = frozenset(
    {"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem"}
)
# Of these spaces: gives what it is given, once it has arrived. Talks to nobody.
_WAITS = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
_SYMMETRIC = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "tile_reduce", "shot_reduce")


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
        is_collective: it talks to other processes. About activations or about parameters: `parameters.py` tells.
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
    def fills(self) -> bool:
        """Whether what comes from other processes is written into its arguments, and its result is not the value."""
        return self.is_collective and (bool(self.writes) or self.name.startswith("c10d."))

    @property
    def is_message(self) -> bool:
        """Whether it goes from one process to another, and not between all of a group."""
        return self.name.startswith(("c10d.send", "c10d.recv"))

    @property
    def can_be_kept(self) -> bool:
        """Whether recomputation can be given its result in place of running it.

        Of the operators that write only those that fill a tensor with random numbers and give it back, and those that
        fill it with what comes from other processes: that is copied there.
        """
        if self.writes:
            return self.is_collective or (self.is_random and self.is_view and len(self.writes) == 1)
        return not (self.is_ignored or self.is_view or self.is_unfilled)


@functools.lru_cache(maxsize=2**12)
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
        is_view=gives_alias(func) or (space in _COLLECTIVE_SPACES and short in _WAITS),
        writes=written_arguments(func) or written_by_collective(func),
        is_random=is_random(func),
        is_routing=short in ROUTING,
        is_collective=_is_collective(space, short),
        flops=flop_registry.get(getattr(func, "overloadpacket", func)),
        hides_writes=hides_writes,
        statistics=arguments_named(func, "running_mean", "running_var") if hides_writes else (),
    )


def _is_collective(space: str, short: str) -> bool:
    if space == "symm_mem":
        return any(part in short for part in _SYMMETRIC)
    return space in _COLLECTIVE_SPACES and short not in _WAITS


@functools.lru_cache(maxsize=2**12)
def talking(operator: Operator) -> Operator:
    """The same operator at a call that talks to other processes, as those of distributed tensors may.

    What then is a view by its schema is none: what it gives has come from elsewhere.
    """
    return replace(operator, is_collective=True, is_view=operator.is_view and bool(operator.writes))


def count_flops(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Operations of one call; 0 where torch's counter knows no formula for it."""
    if operator.flops is None:
        return 0
    if "scaled_dot_product" in operator.name:
        args = _with_all_heads(args, 1 if "backward" in operator.name else 0)
    return int(operator.flops(*args, **kwargs, out_val=result))


def _with_all_heads(args: tuple[Any, ...], first: int) -> tuple[Any, ...]:
    """Arguments of attention with keys and values for each head of the queries; torch 2.11 counts no others.

    Shapes stand for tensors: formulas look at nothing else.
    """
    query, key, value = (args[at].shape for at in range(first, first + 3))
    if query[1] == key[1]:
        return args
    full = (torch.Size((*part[:1], query[1], *part[2:])) for part in (key, value))
    return (*args[: first + 1], *full, *args[first + 3 :])


_HALVES = frozenset({torch.bfloat16, torch.float16})


def is_cached_cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast may have found this cast in its cache, had it stood otherwise.

    What is in that cache differs between forward and recomputation, whose inputs are leaves and are cached too: so
    such casts are neither counted nor kept.
    """
    if func is not TO_COPY or not isinstance(args[0], Tensor) or not args[0].requires_grad:
        return False
    if args[0].dtype is not torch.float32 or kwargs.get("dtype") not in _HALVES:
        return False
    depth = torch.autocast_increment_nesting() - 1  # inside its own casts autocast looks as if it were off
    torch.autocast_decrement_nesting()
    return depth > 0


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor has no memory of its own but wraps others: distributed ones, and those still on their way."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor consists of: itself, or what it wraps; none where memory cannot be told."""
    if type(tensor) in _PLAIN or type(tensor).__module__ == FAKES:  # fake storages are as distinct as real ones
        return [tensor] if tensor.layout is torch.strided else []
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names if isinstance(inner := getattr(tensor, name), Tensor) for part in parts_of(inner)]


def storages_in(*values: Any) -> list[torch.UntypedStorage]:
    """The memory of the tensors among arguments or results."""
    return [part.untyped_storage() for tensor in tensors_in(*values) for part in parts_of(tensor)]


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors among arguments or results, lists and dicts included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return found
