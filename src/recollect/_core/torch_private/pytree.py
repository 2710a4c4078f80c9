"""torch's registry of containers (`torch.utils._pytree`).

Would be replaced by: a public ``torch.utils.pytree`` (only `optree`-backed helpers are public today).
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
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
    return [(at, place) for at, argument in enumerate(spec.children()) for place in _places(argument)]


def _places(spec: Spec) -> Iterator[str]:
    if spec.is_leaf():
        yield ""
        return
    for key, child in zip(_keys(spec), spec.children(), strict=True):
        for rest in _places(child):
            yield key + rest


def _keys(spec: Spec) -> list[str]:
    """What each child of a container is reached by; its index where the class tells only of a container with values."""
    if spec.type is namedtuple:  # a subclass may check what it is made of, as PackedSequence does
        return [f".{field}" for field in spec.context._fields]
    node, count = _NODES[spec.type], spec.num_children
    try:
        marked = node.unflatten_fn(list(range(count)), spec.context)
        keyed, _ = cast("Callable[[Any], Any]", node.flatten_with_keys_fn)(marked)
        return [_pytree.keystr((key,)) for key, _ in keyed]
    except Exception:  # the user's class may refuse these; names are only for people
        return [f"[{index}]" for index in range(count)]
