"""Offloading in graphs: values that are to be offloaded are marked on their nodes, and torch's own pass moves them.

torch's partitioners end with a pass that copies marked values to pinned host memory on a stream of its own, sinks the
waits in forward and begins the copies back ahead of their use. It runs only where its switch is on. Nothing else reads
the switch, and without marks the pass does nothing; so it is turned on when the first mark is made, for good.

Private names: the configuration of ``torch._functorch``, ``node.meta["should_offload"]``, and the operator
``streams::record_stream`` with its fake.
Would be replaced by: a public way to say which saved values of a graph are to be offloaded.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from inspect import signature

import torch
from torch.fx import Node

MARK = "should_offload"
_RECORD_STREAM_TAKES = 2  # a tensor, and the number of a stream
INPUTS = "inputs"
"""What a call of a region says whose inputs go to the host. Of one that offloads nothing it is nothing, and of one that
sends to where graphs cannot, it says where that is."""


def mark_offloaded(node: Node) -> None:
    """Have a node's value offloaded, if it is kept for backward.

    Without an accelerator values are in host memory already, and stay as they are.
    """
    from torch._functorch import config  # not with `import recollect`, which this file is a part of

    node.meta[MARK] = True
    if config.enable_activation_offloading or not torch.accelerator.is_available():
        return
    _mend_record_stream()
    config.enable_activation_offloading = True
    config.activation_offload_separate_stream = True
    config.activation_offload_sink_wait = True
    config.activation_reload_prefetch = True


def _mend_record_stream() -> None:
    """In torch 2.11 the fake of an operator that the pass inserts asks for the arguments of another: it never runs."""
    from torch._dynamo.variables import streams

    record = streams.record_stream
    if record._abstract_fn is None or len(signature(record._abstract_fn).parameters) != _RECORD_STREAM_TAKES:

        @record.register_fake
        def _(tensor: torch.Tensor, stream_index: int) -> None:
            del tensor, stream_index


def refuse_tier(region: str, sends: str) -> str:
    """Say that a graph cannot send to where a region does."""
    return (
        f"region '{region}' offloads to {sends}, but compiled code can offload only to pinned "
        "host memory. Leave offload_to out, or let Dynamo break the graph there "
        "(fullgraph=False), so that the region runs eagerly"
    )
