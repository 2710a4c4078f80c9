"""A word about rules of a policy that matched nothing in any region of a graph, said once when backward is traced."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.fx import Graph

from recollect._core.torch_private.pytree import tree_leaves
from recollect._policy.base import Policy

# While a graph is traced: for each policy the words of the rules that decided something. None: it was told.
_matched: WeakKeyDictionary[Graph, dict[Policy, set[str] | None]] = WeakKeyDictionary()


def note_matches(graph: Graph, policy: Policy, words: set[str], results: Any) -> None:
    """A region under a policy was tagged; when backward reaches it, all regions of the graph were."""
    known = _matched.setdefault(graph, {})
    before = known.setdefault(policy, set())
    if before is not None:
        before |= words

    def tell(*_gradients: Any) -> None:
        found = known.get(policy)
        known[policy] = None
        for label in set(policy.labels) - found if found is not None else ():
            message = f"policy {label} matched nothing in this step, which was compiled as one graph"
            warnings.warn(message, UserWarning, stacklevel=2)

    for result in tree_leaves(results):
        if isinstance(result, Tensor) and result.grad_fn is not None:
            result.grad_fn.register_prehook(tell)
