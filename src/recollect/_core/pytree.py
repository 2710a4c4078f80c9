"""One walk over args and kwargs: the tensors among them, and the way to call again with others in their places.

Tuples, lists, dicts and every class registered with torch's pytree are walked; anything else is a leaf. A call whose
arguments hold no container, the usual case, never reaches the pytree library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recollect._core.torch_private.pytree import Spec, flatten, is_container, leaf_paths, unflatten

_VALUES = frozenset({type(None), bool, int, float, str})


class Arguments:
    """The arguments of one call, flat: `leaves` in order, positional first, and how to put them together again.

    Attributes:
        leaves: every value that is not walked into.
        tensors: indices of the tensors among them.
        objects: the leaves that are neither tensors nor plain values: modules, generators, anything.
    """

    __slots__ = ("_keywords", "_positional", "_spec", "leaves", "objects", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positional = len(args)
        self._keywords = tuple(kwargs)
        self._spec: Spec | None = None
        leaves = self.leaves = [*args, *kwargs.values()]
        tensors: list[int] = []
        objects: list[Any] = []
        index = 0
        while index < len(leaves):
            leaf = leaves[index]
            if isinstance(leaf, Tensor):
                tensors.append(index)
            elif (kind := type(leaf)) not in _VALUES:
                if self._spec is None and is_container(kind):  # none of these are leaves yet: start again
                    leaves, self._spec = flatten(leaves)
                    self.leaves, index = leaves, 0
                    tensors.clear()
                    objects.clear()
                    continue
                objects.append(leaf)
            index += 1
        self.tensors, self.objects = tensors, objects

    @property
    def are_positional(self) -> bool:
        """Whether the leaves are the positional arguments as they stand."""
        return self._spec is None and not self._keywords

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
