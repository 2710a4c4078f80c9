"""What nodes of a backward graph are: gradients or recomputation, with a kernel of their own or pointwise."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from recollect._compile.joint import hint
from recollect._core.operators import operator_of
from recollect._core.torch_private.schemas import OpOverload

_LAYOUTS = frozenset({"clone", "cat", "_to_copy", "convert_element_type"})
"""Not pointwise by their tags, and as cheap."""
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "prod"})


def late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What needs gradients of results: all that is not recomputation."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(source in late for source in node.all_input_nodes):
            late.add(node)
    return late


def has_kernel(node: fx.Node) -> bool:
    """Whether a node is a product, a convolution or attention: what nothing is fused into."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    return operator_of(target).flops is not None or "attention" in target._opname  # torch counts not all of these


def is_cheap(node: fx.Node) -> bool:
    """Whether it is pointwise or a view, so that it may be made again next to whatever reads it."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    own = operator_of(target)
    if own.is_random or own.writes:
        return False
    is_pointwise = torch.Tag.pointwise in target.tags or target._opname in _LAYOUTS
    return is_pointwise or is_view(node)


def is_reduction(node: fx.Node) -> bool:
    """Whether it makes few numbers of many, in a kernel that reads them once."""
    target: Any = node.target
    is_sum = isinstance(target, OpOverload) and target._opname in _REDUCTIONS
    return is_sum and isinstance(node.meta.get("val"), Tensor)


def is_view(node: fx.Node) -> bool:
    """Whether it takes no memory of its own."""
    target: Any = node.target
    return isinstance(target, OpOverload) and (operator_of(target).is_view or target._opname == "_unsafe_view")


def base_of(node: fx.Node) -> fx.Node:
    """What a view is a view of; a node that is none itself."""
    while is_view(node) or is_part_of_view(node):
        node = node.all_input_nodes[0]
    return node


def is_part_of_view(node: fx.Node) -> bool:
    """Whether it takes one out of several views, as of a tensor that is split."""
    return node.target is operator.getitem and is_view(node.all_input_nodes[0])


def bytes_of(node: fx.Node) -> int:
    """What it gives takes."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return sum(hint(part.numel()) * part.element_size() for part in parts if isinstance(part, Tensor))


def count_numbers(node: fx.Node) -> int:
    """How many elements its result has; 0 if that is not a tensor."""
    value = node.meta.get("val")
    return hint(value.numel()) if isinstance(value, Tensor) else 0
