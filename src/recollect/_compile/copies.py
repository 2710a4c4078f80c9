"""Makes cheap values of recomputed regions a second time in backward, just before they are used.

What a region recomputes, backward makes once and holds until its gradients have read it. Of a norm, an activation or a
rotation that is more than is needed: they can be made again from products that are held anyway. torch decides so
between forward and backward, by the smallest cut of a graph. Inside of backward it does not, so that regions compiled
block by block took more memory than compiled blocks that an eager checkpoint runs twice (Qwen3: 24%). So the same
question is asked here, for each region: which values, taken together, are smallest to hold, if what is pointwise or a
view may be made again. The copies wait for the product before their use: Inductor would otherwise make them together
with the originals.

Private names: ``ac_graph_id``, which torch's partitioner reads; `control_deps`, see `ordering.py`.
Would be replaced by: a partitioner of torch that asks this of backward.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import math
from collections import defaultdict

from torch import fx

from recollect._compile.nodes import bytes_of, has_kernel, is_cheap, is_view, late_nodes
from recollect._compile.ordering import wait_for
from recollect._core.torch_private.partitioner import REGION

_SOURCE, _SINK = "source", "sink"


def copy_cheap_values(backward: fx.GraphModule) -> int:
    """Give gradients their own copies of what is cheap to make again; gives how many nodes were added.

    Only in a graph of one region, where torch would run the compiled block twice. In a whole model with many regions
    torch makes nothing twice, and there copies are kernels that nobody else runs: a quarter more of them.
    """
    late = late_nodes(backward.graph)
    regions: dict[int, list[fx.Node]] = defaultdict(list)
    for node in backward.graph.nodes:
        if node.op == "call_function" and node not in late and REGION in node.meta:
            regions[node.meta.get("ac_graph_id", 0)].append(node)
    if len(regions) != 1:
        return 0
    (nodes,) = regions.values()
    again = _made_again(nodes, late)
    if not again:
        return 0
    copying = _Copying(backward.graph, late, again)
    copying.run()
    wait_for(backward, copying.waits())
    return len(copying.made)


def _made_again(nodes: list[fx.Node], late: set[fx.Node]) -> set[fx.Node]:
    """Of a region's recomputed nodes, those that gradients make again from what the smallest cut holds."""
    import networkx as nx  # which torch needs for its own cuts

    own, flow = set(nodes), nx.DiGraph()
    read = {node for node in nodes if any(user in late and user.op != "output" for user in node.users)}
    for node in nodes:
        flow.add_edge((node, 0), (node, 1), capacity=bytes_of(node) + is_view(node))
        if not is_cheap(node):
            flow.add_edge(_SOURCE, (node, 0), capacity=math.inf)
        for source in node.all_input_nodes:
            if source not in own:  # held whatever is decided here
                flow.add_edge(_SOURCE, (source, 1), capacity=0)
                flow.add_edge((source, 1), (node, 0), capacity=math.inf)
        for user in node.users:
            if user in own:
                flow.add_edge((node, 1), (user, 0), capacity=math.inf)
        if node in read:
            flow.add_edge((node, 1), _SINK, capacity=math.inf)
    if _SOURCE not in flow or _SINK not in flow:
        return set()
    cost, (held_side, _) = nx.minimum_cut(flow, _SOURCE, _SINK)
    if cost >= sum(map(bytes_of, read)):
        return set()
    return {node for node in nodes if (node, 0) not in held_side and is_cheap(node)}


class _Copying:
    """Copies nodes for gradients, one set for all that run between two products."""

    def __init__(self, graph: fx.Graph, late: set[fx.Node], again: set[fx.Node]) -> None:
        self._graph, self._late, self._again = graph, late, again
        self.made: dict[fx.Node, fx.Node | None] = {}
        """The copies, and the product that each comes after."""

    def run(self) -> None:
        """Let gradients read copies."""
        last: fx.Node | None = None
        copies: dict[fx.Node, fx.Node] = {}
        for user in [node for node in self._graph.nodes if node in self._late and node.op == "call_function"]:
            for source in user.all_input_nodes:
                if source in self._again:
                    user.replace_input_with(source, self._copy(source, user, copies, last))
            if has_kernel(user):
                last, copies = user, {}

    def _copy(self, node: fx.Node, place: fx.Node, copies: dict[fx.Node, fx.Node], last: fx.Node | None) -> fx.Node:
        if node not in self._again:
            return node
        if node not in copies:
            sources = {source: self._copy(source, place, copies, last) for source in node.all_input_nodes}
            with self._graph.inserting_before(place):
                copies[node] = self._graph.node_copy(node, sources.__getitem__)
            self.made[copies[node]] = last
        return copies[node]

    def waits(self) -> dict[fx.Node, list[fx.Node]]:
        """Which copies are to wait for which product: those that no other copy but a view stands before."""
        found: dict[fx.Node, list[fx.Node]] = {}
        views: set[fx.Node] = set()
        for node, last in self.made.items():
            if any(source in self.made and source not in views for source in node.all_input_nodes):
                continue
            if is_view(node):
                views.add(node)
            elif last is not None:
                found[node] = [last]
        return found
