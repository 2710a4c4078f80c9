"""What Inductor's backward graphs go through where they recompute: cheap copies, their order, when memory is reused.

Inductor orders kernels anew, by what it guesses of memory, and fuses what reads the same values. A backward that
recomputes regions then takes more than it has to: a whole Qwen3 of two layers 81 MiB, in the order of autograd 67.

It also holds on to a buffer that nobody reads any more, if one of the same size is to come, for as long as that stays
below the peak that it has estimated. The estimate knows of no buffer that is written in place and is too high, and the
peak rises to it. Where backward recomputes, a buffer goes on only to the kernel that comes next; the rest is the
allocator's, which gives the memory to whoever is first.

Where a graph has convolutions, it may have their operands with the channels last. What comes from outside in another
layout, the images first of all, it copies at the start, and keeps the copy for backward.

Private names: ``GraphLowering.decide_layout_opt``, by which it decides that. ``min_cut_rematerialization_partition``
as Inductor calls it: there is no hook behind it, but the option ``custom_partitioner_fn``, which is the user's
(`partition.py`). ``EfficientPeakEstimate``, by which Inductor reuses buffers, and the graph that it is at work on
(``V.graph``).
Would be replaced by: a public pass over backward graphs; an option that says how long a buffer may wait.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch
from torch import Tensor, fx

from recollect._compile.copies import copy_cheap_values
from recollect._compile.deferring import defer_readers
from recollect._compile.given import leave_given
from recollect._compile.ordering import keep_order, keep_transfers_in_place
from recollect._compile.transfers import is_transfer
from recollect._core.decisions import Decision
from recollect._core.torch_private.partitioner import DECISION, REGION

_INDUCTOR = "torch._inductor.compile_fx"
_lock = threading.Lock()


def arrange_backward() -> None:
    """From now on, have Inductor's backward graphs arranged; for graphs that recompute nothing, nothing changes."""
    inductor: Any = sys.modules.get(_INDUCTOR)
    with _lock:
        if inductor is None or hasattr(inductor.min_cut_rematerialization_partition, REGION):
            return
        from torch._inductor.codegen import wrapper

        inductor.min_cut_rematerialization_partition = _arranging(inductor.min_cut_rematerialization_partition)
        code: Any = wrapper
        code.EfficientPeakEstimate = _estimating(code.EfficientPeakEstimate)


def turns_images(joint: fx.GraphModule) -> bool:
    """Whether Inductor has convolutions read their operands with the channels last, however they lie."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(joint, is_inference=False))


def find_copied_inputs(joint: fx.GraphModule) -> set[str]:
    """The names of inputs that Inductor copies where it turns images."""
    convolutions = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    operands = {operand for node in convolutions for operand in node.args[:2] if isinstance(operand, fx.Node)}
    return {operand.name for operand in operands if operand.op == "placeholder" and not _has_channels_last(operand)}


def _has_channels_last(node: fx.Node) -> bool:
    value: Tensor = node.meta["val"]
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.dim() not in orders or value.is_contiguous(memory_format=orders[value.dim()])


def _arranging(cut: Any) -> Any:
    @functools.wraps(cut)
    def cut_and_arrange(joint: fx.GraphModule, *args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        leave_given(joint)
        forward, backward = cut(joint, *args, **options)
        keep_transfers_in_place(forward)
        if any(_is_recomputed(node) or is_transfer(node) for node in backward.graph.nodes):
            copies = copy_cheap_values(backward)
            defer_readers(backward)
            keep_order(backward, alone=not copies)
        return forward, backward

    setattr(cut_and_arrange, REGION, True)
    return cut_and_arrange


def _estimating(estimate: Any) -> Any:
    @functools.wraps(estimate, updated=())
    def estimate_peak() -> Any:
        from torch._inductor.virtualized import V

        made: Any = estimate()
        graph: Any = V.graph
        if graph.is_backward and any(map(_is_recomputed, graph.module.graph.nodes)):
            made.overall_peak_memory = 0
        return made

    return estimate_peak


def _is_recomputed(node: fx.Node) -> bool:
    is_forward = node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward"
    return is_forward and (REGION in node.meta or node.meta.get(DECISION) == Decision.RECOMPUTE.value)
