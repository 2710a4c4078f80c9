"""Leaves to torch what regions are given, where it can be made again from less: masks, tables of positions.

What a region takes from operators outside is kept, so that the partitioner does not walk out of the region (`tags.py`).
Of a mask, that is a number for each pair of tokens, where a number for each token is enough: torch's own checkpoint
does not keep it. So the mark moves from such a value to what it is made of, and the partitioner decides about what lies
between. Nor does it keep the result of a norm before the first block, whose input is there for the norm's gradient. The
marks must not move into another region, nor to an input that the step writes into.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from recollect._compile.joint import changed_inputs
from recollect._compile.nodes import bytes_of, is_cheap, late_nodes
from recollect._compile.offloading import MARK
from recollect._core.operators import operator_of
from recollect._core.torch_private.partitioner import GIVEN, CheckpointPolicy
from recollect._core.torch_private.schemas import OpOverload


def leave_given(joint: fx.GraphModule) -> int:
    """Move the marks of a joint graph; gives how many values are no longer marked."""
    marked = [node for node in joint.graph.nodes if node.meta.get(GIVEN) and MARK not in node.meta]
    if not marked:
        return 0
    changed, there = set(changed_inputs(joint)), _needed_anyway(joint.graph)
    count = 0
    for node in marked:
        if not _is_made_of_less(node):
            continue
        sources = _sources([node])
        if not changed.isdisjoint(sources) or any("ac_graph_id" in one.meta for one in sources):
            continue
        kept = [one for one in sources if one.op == "call_function"]
        if sum(bytes_of(one) for one in kept if one not in there) >= bytes_of(node):
            continue
        node.meta.pop("recompute", None)
        count += 1
        for one in kept:
            one.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return count


def _needed_anyway(graph: fx.Graph) -> set[fx.Node]:
    """What gradients outside of regions are made of."""
    late = late_nodes(graph)
    read = [one for node in late for one in node.all_input_nodes if one not in late and "ac_graph_id" not in one.meta]
    return _sources(read)


def _is_made_of_less(node: fx.Node) -> bool:
    """Whether it is fused into what reads it, or made of nothing."""
    if "ac_graph_id" in node.meta or "tangents" in str(node.target):
        return False
    is_made_of_nothing = isinstance(node.target, OpOverload) and not node.all_input_nodes
    return is_cheap(node) or (is_made_of_nothing and not operator_of(node.target).is_random)


def _sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What values are made of that cannot be made again so: inputs, products, values of regions."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if _is_made_of_less(one):
            waiting += one.all_input_nodes
        else:
            found.add(one)
    return found
