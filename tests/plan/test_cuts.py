"""A minimum cut with prices, against all cuts there are."""

import itertools
import random

import pytest

from recollect._plan.solvers.cuts import SINK, SOURCE, Network

pytest.importorskip("scipy")
Edge = tuple[int, int, float, float]


def draw_edges(seed: int) -> tuple[list[int], list[Edge]]:
    """Nodes that cost seconds, as calls do that run again, and edges that cost bytes or must not be cut."""
    draw = random.Random(seed)
    nodes = list(range(2, 2 + draw.randint(1, 6)))
    edges: list[Edge] = [(node, SINK, draw.random() * 10 ** draw.uniform(-5, 0), 0.0) for node in nodes]
    for _ in range(draw.randint(1, 14)):
        start, end = draw.choice([SOURCE, *nodes]), draw.choice(nodes)
        is_fixed = draw.random() < 0.2 and start != SOURCE
        edges.append((start, end, float("inf") if is_fixed else 0.0, 10 ** draw.uniform(0, 9)))
    return nodes, edges


def cost_of(side: set[int], edges: list[Edge], price: float) -> float:
    return sum(s + b * price for start, end, s, b in edges if start in side and end not in side)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_cheaper(seed: int) -> None:
    nodes, edges = draw_edges(seed)
    network = Network()
    assert [network.add() for _ in nodes] == nodes
    for start, end, seconds, size in edges:
        network.connect(start, end, seconds=seconds, bytes=size)
    sides = [
        {SOURCE, *some} for count in range(len(nodes) + 1) for some in itertools.combinations(nodes, count)
    ]  # each part of the nodes
    for price in (0.0, 1e-12, 1e-9, 1e-7, 1.0):
        found = network.cut(price)
        assert found is not None
        least, total = min(cost_of(side, edges, price) for side in sides), sum(edge[2] for edge in edges[: len(nodes)])
        assert cost_of(found, edges, price) <= least + 1e-7 * total


def test_of_two_cuts_that_cost_the_same_the_one_with_fewer_nodes_is_found() -> None:
    network = Network()
    node = network.add()
    network.connect(SOURCE, node, bytes=10)
    network.connect(node, SINK, seconds=1.0)
    assert network.cut(0.1) == {SOURCE}
    assert network.cut(0.1000001) == {SOURCE, node}


def test_a_price_at_which_bytes_hide_all_seconds_is_told() -> None:
    """Of three values one must be kept in any case: at a price without bounds, units for seconds are left no room."""
    network = Network()
    node = network.add()
    network.connect(SOURCE, node, bytes=1 << 40)
    network.connect(node, SINK, seconds=1e-3)
    for _ in range(8):  # whose sum is more than 32 bits have room for
        other = network.add()
        network.connect(SOURCE, other, bytes=1 << 40)
        network.connect(other, SINK, bytes=1 << 40)
    assert network.cut(1e-16) == {SOURCE}
    assert network.cut(1.0) is None
