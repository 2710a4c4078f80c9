"""Regions in code that torch.compile or torch.export traces: imported by such code, while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule

from recollect._apply.offloading import Elsewhere
from recollect._apply.options import Choices
from recollect._compile import dynamo  # noqa: F401 (tells Dynamo of the operator)
from recollect._compile.exported import call_exporting
from recollect._compile.offloading import INPUTS, refuse_tier
from recollect._compile.operator import region_operator
from recollect._core.errors import CompileError
from recollect._core.torch_private.compiler import untraced
from recollect._policy.base import Policy


def call_in_graph(  # noqa: PLR0917 (traced: the fewer objects, the better)
    name: Any,
    fn: Callable[..., Any],
    policy: Policy | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Any = None,
    elsewhere: Elsewhere | None = None,
    sends: str = "",
) -> Any:
    """Call a function as a region of the graph that is being made. With grad mode off it is a plain call.

    Its name, or an object that has it as `name`: that of one among equal blocks is not to be guarded. Nor is
    `elsewhere`, where its holdings go; what a graph makes of that is `sends`, a word.

    Options of the eager engine have no meaning there: nothing is compared, recomputation holds what is needed and no
    more, and random numbers are always drawn again the same way.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if not is_dynamo_compiling():
        return _call_in_export(name, fn, policy, args, kwargs, contexts, sends)
    if elsewhere is None:
        return region_operator(fn, args, kwargs, name=name, policy=policy, contexts=contexts)
    return region_operator(
        fn, args, kwargs, name=name, policy=policy, contexts=contexts, elsewhere=elsewhere, sends=sends
    )


def _call_in_export(  # noqa: PLR0917
    name: Any,
    fn: Callable[..., Any],
    policy: Policy | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Any,
    sends: str,
) -> Any:
    """Where a program is exported without Dynamo, so that functions run as they are written.

    Raises:
        CompileError: the region sends what it holds to where a graph cannot.
    """
    if contexts is not None:
        policy = getattr(contexts()[0], "policy_in_graph", None)
    name = name if isinstance(name, str) else name.name
    if sends not in ("", INPUTS):
        raise CompileError(refuse_tier(name, sends))
    return call_exporting(name, fn, policy, args, kwargs, sends == INPUTS)


@untraced
def _run_eager(  # noqa: PLR0917
    name: Any,
    fn: Callable[..., Any],
    policy: Policy | None,
    contexts: Any,
    elsewhere: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Where Dynamo has broken its graph at the region, or a backend runs Dynamo's graph as it is."""
    if isinstance(fn, GraphModule):
        policy = None  # its rules are about modules and names, which the graph has no more
    name = name if isinstance(name, str) else name.name
    if elsewhere is True:  # of a graph, which carries constants only
        elsewhere = Elsewhere(to="host", takes_inputs=True)
    choices = Choices(policy=policy, elsewhere=elsewhere)
    if contexts is not None:
        choices = replace(choices, options=replace(choices.options, contexts=contexts))
    return choices.region(name, fn).call(args, kwargs)


region_operator.run_eager = _run_eager
