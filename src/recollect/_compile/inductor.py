"""What Inductor's backward graphs go through where they recompute regions: cheap copies, and their order.

Inductor orders kernels anew, by what it guesses of memory, and fuses what reads the same values. A backward that
recomputes regions then takes more than it has to: a whole Qwen3 of two layers 81 MiB, in the order of autograd 67.

Private names: ``min_cut_rematerialization_partition`` as Inductor calls it. There is no hook behind it, but the option
``custom_partitioner_fn``, which is the user's (`partition.py`).
Would be replaced by: a public pass over backward graphs.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from torch import fx

from recollect._compile.copies import copy_cheap_values
from recollect._compile.ordering import keep_order
from recollect._core.torch_private.partitioner import REGION

_INDUCTOR = "torch._inductor.compile_fx"
_lock = threading.Lock()


def arrange_backward() -> None:
    """From now on, have Inductor's backward graphs arranged; for graphs without regions, nothing changes."""
    inductor: Any = sys.modules.get(_INDUCTOR)
    with _lock:
        if inductor is None or hasattr(inductor.min_cut_rematerialization_partition, REGION):
            return
        inductor.min_cut_rematerialization_partition = _arranging(inductor.min_cut_rematerialization_partition)


def _arranging(cut: Any) -> Any:
    @functools.wraps(cut)
    def cut_and_arrange(*args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = cut(*args, **options)
        if any(node.op == "call_function" and _is_recomputed(node) for node in backward.graph.nodes):
            copy_cheap_values(backward)
            keep_order(backward)
        return forward, backward

    setattr(cut_and_arrange, REGION, True)
    return cut_and_arrange


def _is_recomputed(node: fx.Node) -> bool:
    return REGION in node.meta and node.meta.get("partitioner_tag") != "is_backward"
