"""Keeps Inductor from running what a plan recomputes before backward gets there.

The partitioner puts recomputation just before its first use, and a plan's peak is that of this order. Inductor orders
kernels anew, and fuses pointwise ones that read the same memory, however far apart: recomputed values of several layers
were made together, and a step planned for 5.25 MB took 7.42. So each product, convolution and attention of backward is
told to wait for the one before it, unless it reads what comes of that. What lies between two of them may be fused as
before. Transfers of values stand in the same row: begun later than planned, the step would wait for them. Who waits for
a value counts as a reader of it, so that nothing is written into its memory: gradients of logits took a second buffer
because a product waited for the logits that they had been made of.

Private names: the operator `control_deps` of Inductor's passes, `preserve_node_ordering`, which wraps nodes in it, and
how Inductor lowers it (``lowerings``, `IRNode.realize`). Inductor's cache passes graphs with that operator by, because
it is meant to be inserted after the cache was asked. All that it does stands in the graph, so it is marked as
cacheable. Whether arguments wait does not stand there: it follows from the graph.
Would be replaced by: a public way to say that one operator of a graph is to run after another.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx
from torch._C import DispatchKey

from recollect._compile.crossing import find_crossing
from recollect._compile.nodes import has_kernel
from recollect._compile.transfers import is_transfer

_ALONE = "recollect_waits_alone"


def keep_order(backward: fx.GraphModule, *, alone: bool = True, with_sums: bool = False) -> int:
    """Let the operators with kernels of their own run in the order in which they stand; gives how many are told so.

    Args:
        backward: the graph.
        alone: as in `wait_for`.
        with_sums: as in `find_crossing`.
    """
    waits = _chain(backward)
    for node, values in find_crossing(backward, with_sums=with_sums).items():
        waits.setdefault(node, []).extend(values)
    wait_for(backward, {node: waits[node] for node in backward.graph.nodes if node in waits}, alone=alone)
    return len(waits)


def keep_transfers_in_place(forward: fx.GraphModule) -> None:
    """Let values of a forward graph leave where they are to, neither earlier nor later, if some do."""
    if any(map(is_transfer, forward.graph.nodes)):
        wait_for(forward, _chain(forward), alone=True)


def _chain(module: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """For each kernel and each transfer the one before it, unless it reads what comes of that."""
    waits: dict[fx.Node, list[fx.Node]] = {}
    before: fx.Node | None = None
    made_of_it: set[fx.Node] = set()  # of the one before, and so after it anyway
    for node in module.graph.nodes:
        if not made_of_it.isdisjoint(node.all_input_nodes):
            made_of_it.add(node)
        if not (has_kernel(node) or is_transfer(node)):
            continue
        if before is not None and node not in made_of_it:
            waits[node] = [before]
        before, made_of_it = node, {node}
    return waits


def wait_for(module: fx.GraphModule, waits: dict[fx.Node, list[fx.Node]], *, alone: bool = False) -> None:
    """Let each of these nodes run after others, which stand before it.

    Args:
        module: holds them.
        waits: for each node, those before it. They are written to memory.
        alone: whether what is computed for a node as its argument need not wait with it.
    """
    from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    if waits:
        _mend(control_deps)
        others = set(module.graph.find_nodes(op="call_function", target=control_deps))
        places = {node: place for place, node in enumerate(module.graph.nodes)}
        tensors = {
            node: OrderedSet(_find_tensor(one, node, places) for one in before) for node, before in waits.items()
        }
        preserve_node_ordering(module.graph, tensors)
        for node in module.graph.find_nodes(op="call_function", target=control_deps):
            if node not in others:
                node.meta[_ALONE] = alone
        module.recompile()


def _find_tensor(before: fx.Node, node: fx.Node, places: dict[fx.Node, int]) -> fx.Node:
    """Of a kernel with several results the one that lives longest: versions of torch before 2.13 may wait for no tuple.

    Who waits for a result is a reader of it, and one that lives on anyway is no worse off.
    """
    parts = [user for user in before.users if user.target is operator.getitem and places[user] < places[node]]
    return max(parts, key=lambda part: max(map(places.__getitem__, part.users), default=0), default=before)


def _mend(control_deps: Any) -> None:
    """Let it be cached; in torch 2.11 it also has no way to run, on fake tensors neither, where gradients are on."""
    from torch._inductor.lowering import lowerings

    control_deps._cacheable = True
    if not hasattr(lowerings[control_deps], _ALONE):
        lowerings[control_deps] = _lowering(lowerings[control_deps])
    for key in (DispatchKey.CompositeExplicitAutograd, DispatchKey.Autograd):
        if key not in control_deps.py_kernels:
            control_deps.py_impl(key)(_run)


def _lowering(lower: Any) -> Any:
    """Inductor lets all wait that it writes for such a node, and it writes an argument when it is first asked for."""

    @functools.wraps(lower)
    def lower_alone(waits_for: Any, subgraph: Any, *args: Any) -> Any:
        from torch._inductor.ir import IRNode
        from torch._inductor.virtualized import V

        current: Any = V.graph
        if current.current_node.meta.get(_ALONE):
            for argument in args:
                if isinstance(argument, IRNode):
                    argument.realize()
        return lower(waits_for, subgraph, *args)

    setattr(lower_alone, _ALONE, True)
    return lower_alone


def _run(_waits_for: Any, subgraph: Any, *args: Any) -> Any:
    return subgraph(*args)
