"""torch's registry of containers (`torch.utils._pytree`).

Would be replaced by: a public ``torch.utils.pytree`` (only `optree`-backed helpers are public today).
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree

Spec = _pytree.TreeSpec

_PLAIN = frozenset({tuple, list, dict})
_NODES = _pytree.SUPPORTED_NODES


def is_container(kind: type) -> bool:
    """Whether values of this class are walked into. A `torch.Size` is not: it would come back as a tuple."""
    return kind in _PLAIN or (
        kind is not torch.Size and (kind in _NODES or (issubclass(kind, tuple) and hasattr(kind, "_fields")))
    )


def flatten(values: list[Any]) -> tuple[list[Any], Spec]:
    """Leaves of a list of arguments, and its structure."""
    return _pytree.tree_flatten(values, is_leaf=lambda value: type(value) is torch.Size)


def unflatten(leaves: Sequence[Any], spec: Spec) -> list[Any]:
    """The list of arguments with these leaves."""
    values: list[Any] = _pytree.tree_unflatten(leaves, spec)
    return values


def tree_leaves(value: Any) -> list[Any]:
    """Leaves of any structure."""
    return _pytree.tree_leaves(value)


def leaf_paths(spec: Spec) -> list[tuple[int, str]]:
    """For each leaf: the index of the argument it sits in, and its place within it, as written in Python."""
    marked = _pytree.tree_unflatten(range(spec.num_leaves), spec)
    paths, _ = _pytree.tree_flatten_with_path(marked)
    return [(cast("_pytree.SequenceKey[Any]", path[0]).idx, _pytree.keystr(path[1:])) for path, _ in paths]
