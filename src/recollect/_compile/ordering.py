"""Keeps Inductor from running what a plan recomputes before backward gets there.

The partitioner puts recomputation just before its first use, and a plan's peak is that of this order. Inductor orders
kernels anew, and fuses pointwise ones that read the same memory, however far apart: recomputed values of several layers
were made together, and a step planned for 5.25 MB took 7.42. So each product, convolution and attention of backward is
told to wait for the one before it. What lies between two of them may be fused as before.

Private names: the operator `control_deps` of Inductor's passes and `preserve_node_ordering`, which wraps nodes in it.
Inductor's cache passes graphs with that operator by, because it is meant to be inserted after the cache was asked. All
that it does stands in the graph, so it is marked as cacheable.
Would be replaced by: a public way to say that one operator of a graph is to run after another.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._C import DispatchKey

from recollect._core.operators import operator_of
from recollect._core.torch_private.schemas import OpOverload


def keep_order(backward: fx.GraphModule) -> int:
    """Let the operators with kernels of their own run in the order in which they stand; gives how many are told so."""
    waits: dict[fx.Node, fx.Node] = {}
    before: fx.Node | None = None
    for node in backward.graph.nodes:
        if not has_kernel(node):
            continue
        if before is not None and before not in node.all_input_nodes:
            waits[node] = before
        before = node
    wait_for(backward, waits)
    return len(waits)


def wait_for(module: fx.GraphModule, waits: dict[fx.Node, fx.Node]) -> None:
    """Let each of these nodes run after another, which stands before it."""
    from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    if waits:
        _mend(control_deps)
        preserve_node_ordering(module.graph, {node: OrderedSet([before]) for node, before in waits.items()})
        module.recompile()


def _mend(control_deps: Any) -> None:
    """Let it be cached; in torch 2.11 it also has no way to run, on fake tensors neither, where gradients are on."""
    control_deps._cacheable = True
    for key in (DispatchKey.CompositeExplicitAutograd, DispatchKey.Autograd):
        if key not in control_deps.py_kernels:
            control_deps.py_impl(key)(_run)


def _run(_waits_for: Any, subgraph: Any, *args: Any) -> Any:
    return subgraph(*args)


def has_kernel(node: fx.Node) -> bool:
    """Whether a node is a product, a convolution or attention: what nothing is fused into."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    return operator_of(target).flops is not None or "attention" in target._opname  # torch counts not all of these
