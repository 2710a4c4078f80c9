"""A region in a graph: a higher-order operator of our own, whose nodes are tagged when autograd is traced.

Dynamo captures the body (`dynamo.py`) and leaves one call of the operator in its graph. AOTAutograd traces through that
call: the body's operators become nodes of the joint graph, and those that were added get tags, by which torch's
partitioner computes them again in backward (`tags.py`). With a backend that runs Dynamo's graph as it is, the call runs
the eager engine. So it does where Dynamo breaks its graph inside of the region. Without a policy, the pieces between
breaks are then compiled: torch's checkpoint runs them as written, unless the block is compiled apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta

from recollect._compile.changes import Unchanged
from recollect._compile.keys import policy_of
from recollect._compile.matches import note_matches
from recollect._compile.nested import examine, run_nested
from recollect._compile.parts import KeptParts, in_parts
from recollect._compile.tags import tag_since
from recollect._core.torch_private.compiler import Compiling, untraced_around
from recollect._policy.base import Policy

RunEager = Callable[[str, Callable[..., Any], Policy | None, Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function as a region of the eager engine, which is no matter of this room.

From the name, the function, the policy, torch's contexts, where its holdings go (True for its inputs to the host), and
the arguments.
"""


class RegionOperator(HigherOrderOperator):
    """Calls a function as a region.

    In a graph: ``recollect_region(body, *tensors, name=..., key=...)``, all of them constants or nodes; with
    ``offloads_inputs=True`` where the tensors are to be offloaded, ``is_part=True`` where the body is a part of a
    region that Dynamo has cut up. From Python, where Dynamo has broken its graph at the call: the function as the user
    gave it, its arguments, the policy, and where its holdings go.
    """

    def __init__(self) -> None:
        super().__init__("recollect_region", cacheable=True)  # type: ignore[no-untyped-call]
        self.run_eager: RunEager | None = None

    @untraced_around
    def __call__(  # noqa: PLR0913 (what calls give it, in graphs and from Python)
        self,
        body: Any,
        *operands: Any,
        name: Any,
        key: str = "",
        offloads_inputs: bool = False,
        is_part: bool = False,
        policy: Any = None,
        contexts: Any = None,
        elsewhere: Any = None,
        sends: str = "",
        compiler: Any = None,
    ) -> Any:
        """Run the body; while autograd is traced, tag what it adds."""
        del sends  # of use while Dynamo captures the call
        assert self.run_eager is not None, "set where the operator is put to use"
        if not isinstance(body, GraphModule):
            args, kwargs = operands
            if compiler is not None and elsewhere is None:
                body, policy, contexts = _cut(body, compiler, name, policy, contexts)
            return self.run_eager(name, body, policy, contexts, elsewhere, args, kwargs)
        mode = get_proxy_mode()
        if mode is None:
            if torch.is_grad_enabled() and not any(map(_is_traced, operands)):
                return self.run_eager(name, body, policy_of(key), None, offloads_inputs or None, operands, {})
            return examine(body, operands)
        policy = policy_of(key)
        graph = mode.tracer.graph
        start = next(iter(reversed(graph.nodes)), None)
        unchanged = Unchanged(mode.tracer, operands)
        with preserve_node_meta():
            result = run_nested(body, operands, policy)
        added, words = tag_since(graph, start, name, policy, offloads_inputs=offloads_inputs)
        unchanged.watch(added, result)
        if policy is not None and policy.labels and not is_part:  # of a part nobody says that all rules match
            note_matches(graph, policy, words, result)
        return result


def _cut(fn: Callable[..., Any], compiler: Any, name: Any, policy: Policy | None, contexts: Any) -> tuple[Any, ...]:
    """A function that Dynamo compiles in parts, and what decides in its region between them."""
    inside = policy if contexts is None else getattr(contexts()[0], "policy_in_graph", None)
    if inside is not None:
        parts = in_parts(fn, compiler, name if isinstance(name, str) else name.name, inside)
        return (fn, policy, contexts) if parts is None else (parts, KeptParts(inside), None)
    return (Compiling(fn, compiler), None, None) if contexts is None else (fn, policy, contexts)


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(value, FakeTensor | FunctionalTensor)


region_operator = RegionOperator()
