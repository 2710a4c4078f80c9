"""Names in graphs: a higher-order operator that leaves its name on the nodes of its body.

A constant in the graph, not an annotation beside it: caches know compiled code by its graph, so that another name is
other code.
Import it only where Dynamo is at work.
Private names: the operator's class, the mode that traces, and what keeps nodes' metadata.
Would be replaced by: annotations that caches see.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta

from recollect._core.torch_private.capturing import capture_calls
from recollect._core.torch_private.partitioner import BLOCKS, VALUES


class _Named(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("recollect_named", cacheable=True)  # type: ignore[no-untyped-call]

    def __call__(self, body: Any, *operands: Any, name: str, of: str) -> Any:
        if not isinstance(body, GraphModule):  # Dynamo has broken its graph here
            args, kwargs = operands
            return body(*args, **kwargs)
        mode = get_proxy_mode()
        if mode is None:
            return Interpreter(body).run(*operands)
        graph = mode.tracer.graph
        start = next(iter(reversed(graph.nodes)), None)
        with preserve_node_meta():
            result = Interpreter(body).run(*operands)
        for node in reversed(graph.nodes):
            if node is start:
                break
            node.meta[of] = (name, *node.meta.get(of, ()))
        return result


_named = _Named()
capture_calls(_named, lambda _, options: {key: option.as_python_constant() for key, option in options.items()})


def call_named_in_graph(name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block whose nodes carry a name; only ever traced."""
    return _named(fn, args, kwargs, name=name, of=BLOCKS)


def name_in_graph(value: Tensor, name: str) -> Any:
    """The value under a name; only ever traced."""
    return _named(_alias, (value,), {}, name=name, of=VALUES)


def _alias(value: Tensor) -> Tensor:
    return value.view_as(value)
