"""torch's four higher-order operators for regions in graphs, with names and an engine of our own.

Call them in code that torch.compile traces: the function becomes a graph of its own, and the call one node. There
they are known as ``recollect_wrap`` and so on, so that they and torch's can be used side by side. Called elsewhere they
run the function at once. Importing this module imports all of torch._dynamo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from recollect._apply import in_graph  # noqa: F401 (tells Dynamo of regions)
from recollect._apply.function import name_of
from recollect._compile.keys import policy_of
from recollect._compile.operator import region_operator
from recollect._compile.wraps import (
    REGION,
    AddedNodes,
    capture_checkpoint,
    capture_with_grad_mode,
    capture_wrap,
    run,
    run_hooked,
    tagging,
    traced_graph,
)
from recollect._core.operators import operator_of
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.partitioner import CheckpointPolicy
from recollect._core.torch_private.schemas import HigherOrderOperator
from recollect._policy.base import CallPolicy
from recollect.compat.checkpoint import checkpoint, noop_context_fn
from recollect.compat.selective import (
    SAC_IGNORED_OPS,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

__all__ = [
    "TagActivationCheckpoint",
    "Wrap",
    "WrapActivationCheckpoint",
    "WrapWithSetGradEnabled",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_set_grad_enabled",
]

_RECOMPUTE = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
_OPTIONS = frozenset(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"} | {"preserve_rng_state"}


class Wrap(HigherOrderOperator):
    """Calls a function, into which Dynamo does not look: ``wrap(function, *args, **kwargs)``.

    >>> import torch
    >>> from recollect.compat.higher_order import wrap
    >>> wrap(torch.add, torch.ones(2), torch.ones(2), alpha=3)
    tensor([4., 4.])
    """

    def __init__(self) -> None:
        super().__init__("recollect_wrap", cacheable=True)  # type: ignore[no-untyped-call]

    @untraced
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return run(function, args, kwargs)


class WrapWithSetGradEnabled(HigherOrderOperator):
    """Calls a function with grad mode on or off: ``wrap_with_set_grad_enabled(enable_grad, function, *args, ...)``.

    The mode is put back, also if the function raises.

    >>> import torch
    >>> from recollect.compat.higher_order import wrap_with_set_grad_enabled
    >>> wrap_with_set_grad_enabled(False, torch.sin, torch.ones(2, requires_grad=True)).requires_grad
    False
    """

    def __init__(self) -> None:
        super().__init__("recollect_wrap_with_set_grad_enabled", cacheable=True)  # type: ignore[no-untyped-call]

    @untraced
    def __call__(self, enable_grad: bool, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with torch.set_grad_enabled(enable_grad):
            return run(function, args, kwargs)


class _Checkpoint(HigherOrderOperator):
    @staticmethod
    def divide_kwargs(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tell the options of `checkpoint` from the function's own keyword arguments, by name.

        >>> from recollect.compat.higher_order import tag_activation_checkpoint
        >>> tag_activation_checkpoint.divide_kwargs({"use_reentrant": False, "scale": 2.0, "preserve_rng_state": True})
        ({'use_reentrant': False, 'preserve_rng_state': True}, {'scale': 2.0})
        """
        options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
        return options, {name: value for name, value in kwargs.items() if name not in _OPTIONS}

    def _run_eager(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options, own = self.divide_kwargs(kwargs)
        return checkpoint(function, *args, **{**options, "use_reentrant": False}, **own)


class WrapActivationCheckpoint(_Checkpoint):
    """Calls a function as a region of the engine: ``wrap_activation_checkpoint(function, *args, **kwargs)``.

    Keyword arguments that `checkpoint` knows are options, the rest are the function's own. While autograd is traced the
    engine is traced with it, so that backward holds the recomputation as the engine runs it. Of the options only
    ``context_fn`` means anything then. What draws random numbers is kept, and a function that writes into its inputs or
    into buffers is refused: `tag_activation_checkpoint` has neither limit.

    >>> import torch
    >>> from recollect.compat.higher_order import wrap_activation_checkpoint
    >>> x = torch.ones(2, requires_grad=True)
    >>> wrap_activation_checkpoint(torch.sin, x).sum().backward()
    >>> bool((x.grad == x.cos()).all())
    True
    """

    def __init__(self) -> None:
        super().__init__("recollect_wrap_activation_checkpoint")  # type: ignore[no-untyped-call]

    @untraced
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function as a region."""
        if REGION not in kwargs:
            return self._run_eager(function, args, kwargs)
        name, key = kwargs[REGION]
        graph = traced_graph()
        if graph is None:
            return region_operator(function, *args, name=name, key=key)
        users = policy_of(key)
        assert isinstance(function, GraphModule)
        assert users is None or isinstance(users, CallPolicy)
        policy = _Engine(users, graph)

        def run_body(*operands: Any) -> Any:
            return run_hooked(function, operands)

        run_body.__name__ = name
        with tagging(graph, name, policy):
            return checkpoint(
                run_body, *args, use_reentrant=False, preserve_rng_state=False, context_fn=policy.contexts
            )


class TagActivationCheckpoint(_Checkpoint):
    """Calls a function as a region whose nodes are tagged: ``tag_activation_checkpoint(function, *args, **kwargs)``.

    Keyword arguments that `checkpoint` knows are options, the rest are the function's own. While autograd is traced the
    function's nodes get a tag, by which the partitioner recomputes them or, as the policy of ``context_fn`` says, keeps
    them, and a number that no other region has. Random numbers are the same again; of the options only ``context_fn``
    means anything then.

    >>> import torch
    >>> from recollect.compat.higher_order import tag_activation_checkpoint
    >>> x = torch.ones(2, requires_grad=True)
    >>> tag_activation_checkpoint(torch.mul, x, other=x).sum().backward()
    >>> x.grad
    tensor([2., 2.])
    """

    def __init__(self) -> None:
        super().__init__("recollect_tag_activation_checkpoint", cacheable=True)  # type: ignore[no-untyped-call]

    @untraced
    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function as a region."""
        if REGION not in kwargs:
            return self._run_eager(function, args, kwargs)
        name, key = kwargs[REGION]
        return region_operator(function, *args, name=name, key=key)


class _Engine(CallPolicy):
    """What the engine keeps while it is traced: what the user's policy says, and all that would not come out the same.

    Random numbers are drawn once: the nodes of a recomputation cannot go back to an earlier state of a generator. The
    tags say the same, so that nodes of forward and recomputation may be merged; the user is asked once.
    """

    __slots__ = ("_added", "_answers", "_users")

    def __init__(self, users: CallPolicy | None, graph: Graph) -> None:
        self._users, self._added = users, AddedNodes(graph)
        self._answers: dict[int, CheckpointPolicy] = {}

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the two sides of the engine. The function may write into what is kept: the graph has no writes."""
        return create_selective_checkpoint_contexts(self._keeps, allow_cache_entry_mutation=True)

    def judge_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What was answered when the engine ran the call whose node gives this result."""
        del func, args, kwargs
        return self._answers.get(id(result))

    def _keeps(self, context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any) -> bool:
        answer = self._ask(func, args, kwargs, context.op_output)
        for source, value in self._added.take():
            if source not in SAC_IGNORED_OPS:
                self._answers[id(value)] = answer
        return answer not in _RECOMPUTE

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> CheckpointPolicy:
        operator = operator_of(func)
        if operator.is_random or operator.is_routing or operator.is_collective or isinstance(func, HigherOrderOperator):
            return CheckpointPolicy.MUST_SAVE
        answer = None if self._users is None else self._users.judge_call(func, args, kwargs, result)
        return CheckpointPolicy.PREFER_RECOMPUTE if answer is None else answer


wrap = Wrap()
wrap_with_set_grad_enabled = WrapWithSetGradEnabled()
wrap_activation_checkpoint = WrapActivationCheckpoint()
tag_activation_checkpoint = TagActivationCheckpoint()

capture_wrap(wrap)
capture_with_grad_mode(wrap_with_set_grad_enabled)
for _op in (wrap_activation_checkpoint, tag_activation_checkpoint):
    capture_checkpoint(_op, _op.divide_kwargs, name_of=name_of, nothing=noop_context_fn)
