"""Regions in exported programs: what nodes say of them, in words that `torch.export.save` writes.

A tag on a node is forgotten when a program is saved; an annotation, plain text in ``node.meta["custom"]``, is not. So
while a program is exported, decisions stand there as well, and `restore` makes tags of them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from recollect._compile.tags import new_region_id, tag_since
from recollect._core.torch_private.partitioner import DECISION, EXPORTED, REGION, CheckpointPolicy
from recollect._policy.base import Policy


def call_exporting(  # noqa: PLR0917
    name: str,
    fn: Callable[..., Any],
    policy: Policy | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloads_inputs: bool,  # noqa: FBT001
) -> Any:
    """Call a function as a region of a program that is exported without Dynamo: its nodes are tagged."""
    mode = get_proxy_mode()
    if mode is None or not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    graph = mode.tracer.graph
    start = next(iter(reversed(graph.nodes)), None)
    result = fn(*args, **kwargs)
    policy = policy if policy is None else policy.within(name)
    tag_since(graph, start, name, policy, offloads_inputs=offloads_inputs)
    return result


def restore(module: GraphModule) -> list[str]:
    """Tag the nodes of a loaded program as they were when it was exported; gives the names of its regions."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    said = [(node, node.meta["custom"][EXPORTED]) for graph in graphs for node in graph.nodes if _is_said(node)]
    ids = {number: new_region_id() for number in sorted({word["number"] for _, word in said})}
    for node, word in said:
        node.meta["recompute"] = CheckpointPolicy[word["choice"]]
        if word["number"]:  # 0: saved for a region, and in none
            node.meta["ac_graph_id"] = ids[word["number"]]
            node.meta[DECISION], node.meta[REGION] = word["decision"], word["region"]
    return list(dict.fromkeys(word["region"] for _, word in said if word["number"]))


def _is_said(node: Node) -> bool:
    return EXPORTED in (node.meta.get("custom") or ())
