"""Finds values of backward to write before a kernel runs, because what they are made of is larger.

Inductor writes a pointwise value nowhere if few read it: each reader makes it again from what it is made of. A sum of
gradients that one kernel reads now and another one much later then holds its terms until the later one, in place of
the sum: at the blocks of a ResNet three tensors in place of one, through all of the block's backward.

The gradient of a bias is a sum that nobody reads before the step ends. Inductor puts off such sums to make several in
one kernel, and holds what they are made of: in a ConvNeXt the widest gradient of a block through its convolution, where
a budget of 50% was exceeded.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from recollect._compile.nodes import bytes_of, has_kernel, is_cheap, is_reduction, is_view

_SMALL = 64  # times as large are values that count: a wait for each small one is not worth it
_LARGE = 8  # times as small at least is what sums hold, if it does not count


def find_crossing(backward: fx.GraphModule, *, with_sums: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """For each kernel that should wait for some, the values to write before it.

    They are pointwise, read before it and after it, and take less than what only they are made of. What is read only
    after it, such as one of two gradients of a gated layer, Inductor makes where the other one is made.

    Args:
        backward: the graph.
        with_sums: whether sums that nobody reads before the kernel are among them, if what only they are made of is
            large. Apart from each other they are more kernels (in a ViT, 43 in place of 39), so only a step that has to
            stay within what was predicted asks for them.
    """
    nodes = list(backward.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    kernels = [node for node in nodes if has_kernel(node)]
    readers = {node: _readers(node) for node in nodes}
    last = {node: max(map(places.__getitem__, found), default=0) for node, found in readers.items()}
    most = max(map(bytes_of, nodes), default=0)
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    written: set[fx.Node] = set()
    for node in nodes:
        is_sum = with_sums and is_reduction(node)
        if not (is_sum or (is_cheap(node) and not is_view(node) and bytes_of(node) > most // _SMALL)):
            continue
        kernel = next((one for one in kernels if places[one] > places[node]), None)
        if kernel is None or last[node] <= places[kernel] or kernel in readers[node]:
            continue
        is_read_after = all(places[reader] > places[kernel] for reader in readers[node])
        if is_read_after is not is_sum:
            continue
        gone = (one for one in _sources(node, written) if last[one] < places[kernel] and not _is_held(one))
        if sum(map(bytes_of, gone)) > (most // _LARGE if is_sum else bytes_of(node)):
            found[kernel].append(node)
            written.add(node)
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a node or a view of it."""
    direct = [user for user in node.users if not is_view(user)]
    return [*direct, *(reader for user in node.users if is_view(user) for reader in _readers(user))]


def _sources(node: fx.Node, written: set[fx.Node]) -> set[fx.Node]:
    """What lies in memory that a pointwise node is made of."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if is_cheap(one) and one not in written:
            waiting += one.all_input_nodes
        else:
            found.add(one)
    return found


def _is_held(node: fx.Node) -> bool:
    """Whether it is there for as long as the step runs: a parameter, or an input."""
    return node.op == "placeholder" and "primals" in str(node.target)
