"""Lets a product that reads a recomputed value run after the next one, where one kernel can then make all they need.

Backward of a linear layer is two products: the gradient of its weight reads the layer's input, that of its input does
not. An input that is recomputed pointwise, such as an activation, is made from what the kernel after the second product
reads anyway. One kernel makes both, unless the first product has to run before it. What the second product gives then
takes the place of the recomputed value in memory, and the gradient that both read lives no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

from recollect._compile.joint import Joint
from recollect._compile.nodes import base_of, bytes_of, count_numbers, has_kernel, is_cheap, is_view, late_nodes
from recollect._plan.simulate import Simulation

Room = Callable[[Sequence[fx.Node]], int]
"""How many bytes more may be in use while some nodes of backward run."""


def find_room(joint: Joint, simulation: Simulation) -> Room:
    """What may be in use at each place beside what a simulation has there, without a higher peak.

    Args:
        joint: the graph that was cut.
        simulation: of the cut.
    """
    numbers = {node.name: number for number, node in enumerate(joint.nodes)}
    places = {step.call: place for place, step in enumerate(simulation.steps) if not step.again}

    def find(nodes: Sequence[fx.Node]) -> int:
        of_backward = (places[numbers[node.name]] for node in nodes if node.name in numbers)
        passed = [place for place in of_backward if place >= simulation.backward_start]
        if not passed:
            return 0
        return simulation.peak_bytes - max(simulation.bytes_at[min(passed) : max(passed) + 1])

    return find


def defer_readers(backward: fx.GraphModule, room: Room | None = None) -> int:
    """Put products behind the next one where that saves a kernel; gives how many were moved.

    The kernel that makes the recomputed value beside what comes of the second product holds all that it reads and
    writes at once: what a plan foresees is less.

    Args:
        backward: the graph.
        room: where memory counts, how much more may be in use; None for as much as it takes.
    """
    graph = backward.graph
    late = late_nodes(graph)
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    kernels = [place for place, node in enumerate(nodes) if has_kernel(node)]
    moved: set[fx.Node] = set()
    for first, second, end in zip(kernels, kernels[1:], [*kernels[2:], len(nodes)], strict=False):
        product = nodes[first]
        if product not in late or nodes[second] not in late or product in moved:
            continue
        made = [product]  # and what comes of it before the second
        for node in nodes[first + 1 : second]:
            if not set(node.all_input_nodes).isdisjoint(made):
                made.append(node)
        is_free = set(nodes[second].all_input_nodes).isdisjoint(made)
        holds_nothing = _gradients_of(product, late) <= _gradients_of(nodes[second], late)
        if not (is_free and holds_nothing):
            continue
        more = _find_more_bytes(product, nodes[second], nodes[second + 1 : end], late, places)
        if more is not None and (room is None or more <= room(nodes[first : end + 1])):
            for node in reversed(made):
                nodes[second].append(node)
            moved |= {product, nodes[second]}
    if moved:
        graph.lint()
        backward.recompile()
    return len(moved) // 2


def _find_more_bytes(
    first: fx.Node, second: fx.Node, after: Sequence[fx.Node], late: set[fx.Node], places: dict[fx.Node, int]
) -> int | None:
    """What one kernel would hold beside what several do, if it can make something that the first reads.

    That is what it makes: each of several kernels writes into something that it reads.

    Returns:
        None if the kernel that reads what the second gives can make nothing that the first reads.
    """
    for argument in first.all_input_nodes:
        value = base_of(argument)
        if value in late or not is_cheap(value) or bytes_of(second) > bytes_of(value):
            continue
        aliases = {value} | _reach(value, lambda node: filter(is_view, node.users))
        if any(has_kernel(user) and places[user] < places[first] for alias in aliases for user in alias.users):
            continue  # it is in memory already
        sources, size = _sources(value), count_numbers(value)
        of_that_size = (node for node in after if is_cheap(node) and count_numbers(node) == size)
        if any(second in (read := _sources(node)) and not sources.isdisjoint(read) for node in of_that_size):
            made = (node for node in _reach(second, lambda one: filter(is_cheap, one.users)) if not is_view(node))
            return bytes_of(value) + sum(bytes_of(node) for node in made if _is_written(node))
    return None


def _is_written(node: fx.Node) -> bool:
    """Whether something that is not a part of the same kernel reads it."""
    aliases = {node} | _reach(node, lambda one: filter(is_view, one.users))
    return any(has_kernel(user) or user.op == "output" for alias in aliases for user in alias.users)


def _gradients_of(product: fx.Node, late: set[fx.Node]) -> set[fx.Node]:
    """The gradients that a product reads, as they lie in memory."""
    return {value for value in map(base_of, product.all_input_nodes) if value in late}


def _sources(node: fx.Node) -> set[fx.Node]:
    """What lies in memory that a pointwise node, and those before it, are made of."""
    reached = _reach(node, lambda one: one.all_input_nodes if is_cheap(one) else ())
    return {one for one in reached if not is_cheap(one)}


def _reach(start: fx.Node, follow: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """All nodes on the way from one, without it."""
    found: set[fx.Node] = set()
    waiting = [start]
    while waiting:
        new = [node for node in follow(waiting.pop()) if node not in found]
        found.update(new)
        waiting += new
    return found
