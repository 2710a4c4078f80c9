"""One walk over args and kwargs: the tensors among them, and the way to call again with others in their places.

Tuples, lists, dicts and every class registered with torch's pytree are walked; anything else is a leaf. A call whose
arguments hold no container, the usual case, never reaches the pytree library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recollect._core.torch_private.pytree import Spec, flatten, is_container, leaf_paths, unflatten


class Arguments:
    """The arguments of one call, flat: `leaves` in order, positional first, and how to put them together again."""

    __slots__ = ("_keywords", "_positional", "_spec", "leaves")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any] = [*args, *kwargs.values()] if kwargs else list(args)
        self._positional = len(args)
        self._keywords = tuple(kwargs) if kwargs else ()
        self._spec: Spec | None = None
        for leaf in leaves:
            kind = type(leaf)
            if kind is not Tensor and is_container(kind):
                leaves, self._spec = flatten(leaves)
                break
        self.leaves = leaves

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Give args and kwargs with these leaves; containers are made anew each time."""
        values: Sequence[Any] = leaves if self._spec is None else unflatten(leaves, self._spec)
        if not self._keywords:
            return values, {}
        positional = self._positional
        return values[:positional], dict(zip(self._keywords, values[positional:], strict=True))

    def describe(self, index: int) -> str:
        """Name leaf `index` as its caller wrote it: ``argument 0``, ``argument 'mask'``, ``argument 'cache'[0]``."""
        place, rest = index, ""
        if self._spec is not None:
            place, rest = leaf_paths(self._spec)[index]
        if place < self._positional:
            return f"argument {place}{rest}"
        return f"argument '{self._keywords[place - self._positional]}'{rest}"
