"""What the operators of `recollect.compat.higher_order` need of torch: to be captured, and to run while it traces.

Private names: Dynamo's table from operator to variable and some of its variables; the mode that traces; the switch by
which AOTAutograd turns saved-tensor hooks off. Imports all of torch._dynamo.
Would be replaced by: a public way to register a higher-order operator with Dynamo.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _C
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, TupleVariable, higher_order_ops
from torch._dynamo.variables.functions import NestedUserFunctionVariable
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta

from recollect._compile.dynamo import read_options
from recollect._compile.numbering import original_of
from recollect._compile.tags import nodes_since, tag_since
from recollect._core.torch_private.capturing import capture_calls, value_of
from recollect._policy.base import Policy

Divide = Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
"""From keyword arguments to an operator's options and the function's own."""

REGION = "recollect_region"
"""The keyword argument by which a call in a graph says its region's name and the key of its policy."""


def capture_wrap(op: HigherOrderOperator) -> None:
    """Let Dynamo capture ``op(fn, *args, **kwargs)`` as ``op(body, *operands)``."""
    captured = _variable_of(op)

    class Variable(captured):  # type: ignore[misc, valid-type]
        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return super()._call_function(tx, _packed(args, kwargs), {})

    _register(op, Variable)


def capture_with_grad_mode(op: HigherOrderOperator) -> None:
    """Let Dynamo capture ``op(enable_grad, fn, *args, **kwargs)`` as ``op(enable_grad, body, *operands)``."""
    captured = _variable_of(op)

    class Variable(captured):  # type: ignore[misc, valid-type]
        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            self._enable_grad = value_of(args[0].realize())
            return super()._call_function(tx, _packed(args[1:], kwargs), {})

        def create_wrapped_node(self, *args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(self._enable_grad):
                operands, *rest = super().create_wrapped_node(*args, **kwargs)
            return ((self._enable_grad, *operands), *rest)

    _register(op, Variable)


def capture_checkpoint(
    op: HigherOrderOperator,
    divide: Divide,
    *,
    name_of: Callable[[Any], str],
    nothing: Callable[[], Any],
) -> None:
    """Let Dynamo capture ``op(fn, *args, **kwargs)`` as ``op(body, *operands, recollect_region=(name, key))``.

    Args:
        op: the operator.
        divide: tells its options from the function's own keyword arguments. In a graph those besides ``context_fn``
            have no meaning.
        name_of: gives the name of a function's region.
        nothing: the ``context_fn`` that stands for none.
    """
    captured = _variable_of(op, lambda constants: {REGION: tuple(constants.values())})

    class Variable(captured):  # type: ignore[misc, valid-type]
        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if REGION in kwargs:  # in a graph that is traced again
                name, key = kwargs[REGION].as_python_constant()
                given = {"name": ConstantVariable.create(name), "key": ConstantVariable.create(key)}
                return super()._call_function(tx, _packed(args, {}), given)
            options, own = divide(kwargs)
            contexts = options.get("context_fn", ConstantVariable.create(None)).realize()
            if value_of(contexts) is nothing:
                contexts = ConstantVariable.create(None)
            asked = {
                "name": ConstantVariable.create(_name_of(args[0].realize(), name_of)),
                "policy": ConstantVariable.create(None),
                "contexts": contexts,
            }
            constants = read_options([arg.realize() for arg in args], asked)
            given = {name: ConstantVariable.create(value) for name, value in constants.items()}
            return super()._call_function(tx, _packed(args, own), given)

    _register(op, Variable)


def run(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; if it was captured, and autograd is traced, its nodes keep what they know of their origin."""
    if kwargs or not isinstance(body, GraphModule) or traced_graph() is None:
        return body(*args, **kwargs)
    with preserve_node_meta():
        return Interpreter(body).run(*args)


def run_hooked(body: GraphModule, operands: tuple[Any, ...]) -> Any:
    """Run a captured function so that saved-tensor hooks see what autograd saves, although it is traced."""
    with _hooks_in_force(), preserve_node_meta():
        return Interpreter(body).run(*operands)


def traced_graph() -> Graph | None:
    """The graph that is being traced, if any is."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


@contextmanager
def tagging(graph: Graph, name: str, policy: Policy) -> Iterator[None]:
    """Tag the nodes that are added inside: equal nodes are merged, and tags outlive that."""
    start = _last(graph)
    yield
    tag_since(graph, start, name, policy)


class AddedNodes:
    """The nodes that were added to a graph since this was last asked."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._last = graph, _last(graph)

    def take(self) -> list[tuple[Any, Any]]:
        """The operator that each comes from, and the example of what it gives."""
        start, self._last = self._last, _last(self._graph)
        nodes = nodes_since(self._graph, start)
        return [(original_of(node), node.meta["val"]) for node in nodes]


def _last(graph: Graph) -> Node | None:
    return next(iter(reversed(graph.nodes)), None)


@contextmanager
def _hooks_in_force() -> Iterator[None]:
    # AOTAutograd turns them off while it traces, and torch's own operator then recomputes nothing (2.11, 2.13).
    before = _C._autograd._saved_tensors_hooks_set_tracing(False)  # noqa: FBT003
    try:
        yield
    finally:
        _C._autograd._saved_tensors_hooks_set_tracing(before)


def _variable_of(op: HigherOrderOperator, constants: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Any:
    """How Dynamo captures ``op(fn, args, kwargs, **options)``."""

    def read(_called: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        values = {name: option.as_python_constant() for name, option in options.items()}
        return values if constants is None else constants(values)

    capture_calls(op, read)
    return higher_order_ops._hop_name_to_variable_class[op.__name__]


def _register(op: HigherOrderOperator, variable: Any) -> None:
    higher_order_ops._hop_name_to_variable_class[op.__name__] = variable


def _packed(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """A call as `capture_calls` takes it: function, positional and keyword arguments."""
    keywords = {ConstantVariable.create(name): value for name, value in kwargs.items()}
    return [args[0], TupleVariable(list(args[1:])), ConstDictVariable(keywords, dict)]


def _name_of(variable: Any, name_of: Callable[[Any], str]) -> str:
    if isinstance(variable, NestedUserFunctionVariable):  # made inside what is traced: there is no function yet
        return variable.get_code().co_name
    return name_of(_function_of(variable))


def _function_of(variable: Any) -> Any:
    """The function that Dynamo sees, as far as it has a name."""
    return next((getattr(variable, name) for name in ("fn", "value") if hasattr(variable, name)), variable)
