"""Graphs inside a region's graph (`torch.compiler.nested_compile_region`): recomputed as a unit, or decided inside.

In a region without a policy a nested graph stays one node, compiled once for all its calls, and is recomputed as one.
That needs a graph which comes out the same when it is run again. Where a policy decides operator by operator, and where
a nested graph draws random numbers, chooses, communicates, writes or holds branches, its operators become nodes of the
region: the compiler sees each call of it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._higher_order_ops import invoke_subgraph
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode

from recollect._core.operators import operator_of
from recollect._policy.base import CallPolicy, Policy

_IS_PLAIN = "recollect_is_plain"


def is_nested(target: Any) -> bool:
    """Whether an operator calls a nested graph."""
    return target is invoke_subgraph


def examine(body: GraphModule, operands: tuple[Any, ...]) -> Any:
    """Run a region's body before it is traced; notes of each graph nested in it whether it may be run again."""
    return _Examining(body).run(*operands)


def run_nested(body: GraphModule, operands: tuple[Any, ...], policy: Policy | None) -> Any:
    """Run a region's body while it is traced; nested graphs that are not recomputed as a unit run as a part of it."""
    decides_inside = policy is not None and not isinstance(policy, CallPolicy)  # torch's kind is asked about operators
    return (_Inlining if decides_inside else _Keeping)(body).run(*operands)


class _Inlining(Interpreter):
    """Runs nested graphs as a part of the graph that calls them."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        if is_nested(target) and isinstance(args[0], GraphModule):
            return self.run_inside(args[0], args[2:])
        return super().call_function(target, args, kwargs)

    def run_inside(self, graph: GraphModule, operands: tuple[Any, ...]) -> Any:
        """Run a nested graph."""
        return type(self)(graph).run(*operands)


class _Keeping(_Inlining):
    """The same, but graphs that may be run again stay calls."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        if is_nested(target) and isinstance(args[0], GraphModule) and args[0].meta.get(_IS_PLAIN, False):
            return Interpreter.call_function(self, target, args, kwargs)
        return super().call_function(target, args, kwargs)


class _Examining(_Inlining):
    """Looks at the operators of nested graphs while it runs them."""

    def run_inside(self, graph: GraphModule, operands: tuple[Any, ...]) -> Any:
        """Run a nested graph, and note what it is."""
        if any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes):
            graph.meta[_IS_PLAIN] = False  # branches, loops, more graphs: a dispatch mode has no rule for them
            return super().run_inside(graph, operands)
        with _PurityMode() as watch:
            result = Interpreter(graph).run(*operands)
        graph.meta[_IS_PLAIN] = graph.meta.get(_IS_PLAIN, True) and watch.is_plain
        return result


class _PurityMode(TorchDispatchMode):
    """Sees whether all operators that run would come out the same if they were run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_plain = True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        op = operator_of(func)
        if op.is_random or op.is_routing or op.is_collective or op.hides_writes or _writes(func):
            self.is_plain = False
        return func(*args, **(kwargs or {}))


def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or schema.is_mutable
