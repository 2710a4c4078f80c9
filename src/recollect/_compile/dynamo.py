"""Tells Dynamo how regions are captured, when it is imported."""

from __future__ import annotations

from typing import Any

from torch import nn

from recollect._compile.keys import goes_by_names, key_of, name_of_all
from recollect._compile.offloading import INPUTS, refuse_tier
from recollect._compile.operator import region_operator
from recollect._core.torch_private.capturing import (
    break_graph,
    capture_calls,
    guarded_by_nothing,
    modules_called,
    value_of,
)
from recollect._policy.base import Policy


def read_options(called: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The constants of a region: its name, its policy's, and whether its inputs are offloaded.

    Equal blocks are compiled once for all: their names stand in the graph without numbers, and are no guard, unless the
    policy may go by them.
    """
    policy, contexts = value_of(options["policy"]), value_of(options["contexts"])
    if contexts is not None:
        policy = _policy_of(contexts)
    owner = guarded_by_nothing(options["name"])
    name: str = owner if isinstance(owner, str) else owner.name
    sends = value_of(options["sends"]) if "sends" in options else ""
    if sends not in ("", INPUTS):
        break_graph(refuse_tier(name, sends))
    if policy is not None:
        policy = policy.within(name)
        _check_modules(policy, modules_called(called))
    if goes_by_names(policy):
        value_of(options["name"])
    else:
        name = name_of_all(name)
    constants = {"name": name, "key": key_of(policy)}
    return {**constants, "offloads_inputs": True} if sends == INPUTS else constants


def _policy_of(contexts: Any) -> Policy:
    """The policy behind a ``context_fn``; if there is none, Dynamo breaks the graph, and the eager engine runs."""
    forward, _ = contexts()
    policy: Policy | None = getattr(forward, "policy_in_graph", None)
    if policy is None:
        break_graph(
            f"context_fn returned {type(forward).__name__}: in a compiled graph only the contexts of a policy "
            "work (recollect.compat.create_selective_checkpoint_contexts)"
        )
    return policy


def _check_modules(policy: Policy, roots: list[nn.Module]) -> None:
    """Where a pattern matches none of the region's modules, Dynamo breaks the graph, and the eager engine refuses."""
    paths = {path: module for root in roots[::-1] for path, module in root.named_modules() if path or len(roots) > 1}
    try:
        if roots:
            policy.check_modules(paths)
    except ValueError as error:
        break_graph(str(error))


capture_calls(region_operator, read_options)
