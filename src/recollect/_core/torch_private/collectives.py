"""What collectives write and answer, how many this process took part in, and where to stop looking for who asks.

Private names: the schemas of the ``c10d`` operators, which do not say what they write; `FakeWork`, a work that is done
already, and how a `Work` is boxed for the dispatcher; the table of process groups and their sequence numbers;
`wait_tensor`; `Module._call_impl`.
Replaced by: schemas that say it; a public completed `Work`; a public count; a mark by which engines that shard
parameters say so of their collectives.
Run on: torch 2.11, 2.13 (gloo).
"""

from __future__ import annotations

import functools
import sys
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

__all__ = [
    "MODULE_CALLS",
    "answer",
    "count_collectives",
    "process_groups",
    "wait_for",
    "works_in",
    "written_by_collective",
]

_WRITTEN = {
    "c10d": ("output_tensors", "output_tensor", "output_lists", "outputs", "output"),
    "_c10d_functional": (),
}
_WRITES_ITS_INPUT = frozenset(
    {
        *(f"c10d.{name}" for name in ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")),
        *(f"c10d.{name}" for name in ("recv_", "recv_any_source_")),
        *(f"_c10d_functional.{name}" for name in ("irecv", "batch_p2p_ops")),
    }
)


def _call_codes() -> frozenset[CodeType]:
    code = nn.Module._call_impl.__code__
    return frozenset({code, *(part for part in code.co_consts if isinstance(part, CodeType))})


MODULE_CALLS = _call_codes()
"""The code of a call of a module, functions within it included."""


def written_by_collective(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that a collective writes into without a word in its schema.

    >>> import torch.distributed
    >>> written_by_collective(torch.ops.c10d.alltoall_base_.default)
    ((0, 'output'),)
    >>> written_by_collective(torch.ops.c10d.allreduce_.default), written_by_collective(torch.ops.c10d.send.default)
    (((0, 'tensors'),), ())
    """
    if not isinstance(func, OpOverload) or func.namespace not in _WRITTEN:
        return ()
    names = _WRITTEN[func.namespace]
    if str(func).rpartition(".")[0] in _WRITES_ITS_INPUT:
        names = ("tensors", "tensor")
    arguments = enumerate(func._schema.arguments)
    return tuple((position, argument.name) for position, argument in arguments if argument.name in names)


@functools.lru_cache(maxsize=2**12)
def _answers(func: OpOverload) -> tuple[bool, ...]:
    """For each result, whether it is a `Work`."""
    return tuple("c10d.Work" in str(result.type) for result in func._schema.returns)


def answer(func: Any, filled: Any) -> Any:
    """What a collective gives that was not made, because what it writes into was filled otherwise.

    Args:
        func: the operator.
        filled: the argument that it would have written into.
    """
    from torch._C._distributed_c10d import FakeWork  # not everywhere

    parts = [FakeWork().boxed() if is_work else filled for is_work in _answers(func)]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else tuple(parts)


def works_in(result: Any) -> list[Any]:
    """What can be waited for among what an operator gave: each a `Work`, boxed."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part for part in parts if isinstance(part, torch.ScriptObject)]


def wait_for(works: list[Any], tensors: list[Tensor]) -> None:
    """Return when collectives have written what they write.

    A message may be waited for only once with some backends, so this must come after whoever sent it has done so.

    Args:
        works: from `works_in`.
        tensors: what functional collectives gave, or others on the same memory; harmless where nothing is on its way.
    """
    from torch._C._distributed_c10d import Work  # not everywhere

    for boxed in works:
        work = Work.unbox(boxed)
        if not work.is_completed():
            work.wait()
    for tensor in tensors:
        torch.ops._c10d_functional.wait_tensor(tensor)


def process_groups() -> Any:
    """The process groups that there are now; empty where there are none."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return () if c10d is None else c10d._world.pg_map


def count_collectives() -> int:
    """How many collectives and messages this process took part in, over the process groups that there are now.

    0.2 µs for each group.

    >>> count_collectives()
    0
    """
    groups = process_groups()
    if not groups:
        return 0
    try:
        return sum(group._get_sequence_number_for_group() for group in groups)
    except RuntimeError:  # a backend that does not count
        return 0
