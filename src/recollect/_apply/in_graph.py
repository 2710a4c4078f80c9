"""Regions in code that torch.compile or torch.export traces: imported by such code, while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule

from recollect._apply.options import Choices
from recollect._compile import dynamo  # noqa: F401 (tells Dynamo of the operator)
from recollect._compile.exported import call_exporting
from recollect._compile.operator import region_operator
from recollect._core.torch_private.compiler import untraced
from recollect._policy.base import Policy


def call_in_graph(  # noqa: PLR0917 (traced: the fewer objects, the better)
    name: Any,
    fn: Callable[..., Any],
    policy: Policy | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Any = None,
) -> Any:
    """Call a function as a region of the graph that is being made. With grad mode off it is a plain call.

    Its name, or an object that has it as `name`: that of one among equal blocks is not to be guarded.

    Options of the eager engine have no meaning there: nothing is compared, recomputation holds what is needed and no
    more, and random numbers are always drawn again the same way.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if not is_dynamo_compiling():
        return _call_in_export(name, fn, policy, args, kwargs, contexts)
    return region_operator(fn, args, kwargs, name=name, policy=policy, contexts=contexts)


def _call_in_export(  # noqa: PLR0917
    name: Any,
    fn: Callable[..., Any],
    policy: Policy | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Any,
) -> Any:
    """Where a program is exported without Dynamo, so that functions run as they are written."""
    if contexts is not None:
        policy = getattr(contexts()[0], "policy_in_graph", None)
    return call_exporting(name if isinstance(name, str) else name.name, fn, policy, args, kwargs)


@untraced
def _run_eager(  # noqa: PLR0917
    name: Any,
    fn: Callable[..., Any],
    policy: Policy | None,
    contexts: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Where Dynamo has broken its graph at the region, or a backend runs Dynamo's graph as it is."""
    if isinstance(fn, GraphModule):
        policy = None  # its rules are about modules and names, which the graph has no more
    name = name if isinstance(name, str) else name.name
    choices = Choices(policy=policy)
    if contexts is not None:
        choices = replace(choices, options=replace(choices.options, contexts=contexts))
    return choices.region(name, fn).call(args, kwargs)


region_operator.run_eager = _run_eager
