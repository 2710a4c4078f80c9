"""One walk over args and kwargs: the tensors among them, and the way to call again with others in their places.

Tuples, lists, dicts and every class registered with torch's pytree are walked; anything else is a leaf. The first three
are walked here, which takes a fifth of the time; what holds a registered class is left to the pytree library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from torch import Tensor

from recollect._core.torch_private.pytree import Spec, flatten, is_container, leaf_paths, unflatten

_VALUES = frozenset({type(None), bool, int, float, str})

Parts = list["tuple[type, tuple[Any, ...] | None, Parts] | None"]
"""The values of a container: None for a leaf, for another container its type, its keys if it is a dict, its values."""


class Arguments:
    """The arguments of one call, flat: `leaves` in order, positional first, and how to put them together again.

    Attributes:
        leaves: every value that is not walked into.
        tensors: indices of the tensors among them.
        objects: the leaves that are neither tensors nor plain values: modules, generators, anything.
        are_positional: whether the leaves are the positional arguments as they stand.
    """

    __slots__ = ("_keywords", "_positional", "_structure", "are_positional", "leaves", "objects", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positional = len(args)
        self._keywords = tuple(kwargs)
        self._structure: Parts | Spec | None = None  # where containers are among them
        values = [*args, *kwargs.values()]
        if not self._sort(values):
            self._open(values)
        self.are_positional = self._structure is None and not kwargs

    def _sort(self, leaves: list[Any], *, may_hold: bool = True) -> bool:
        """Take these as they are; False if one is a container."""
        self.leaves = leaves
        tensors: list[int] = []
        objects: list[Any] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                tensors.append(index)
            elif (kind := type(leaf)) not in _VALUES:
                if may_hold and is_container(kind):
                    return False
                objects.append(leaf)
        self.tensors, self.objects = tensors, objects
        return True

    def _open(self, values: list[Any]) -> None:
        """Take the leaves of arguments that hold containers."""
        self.leaves, self.tensors, self.objects = [], [], []
        try:
            self._structure = self._take_apart(values)
        except _Registered:
            leaves, self._structure = flatten(values)
            self._sort(leaves, may_hold=False)

    def _take_apart(self, values: Iterable[Any]) -> Parts:
        """Add the leaves among these values, and those of the containers among them; gives how they stood."""
        parts: Parts = []
        leaves = self.leaves
        for value in values:
            kind = type(value)
            if isinstance(value, Tensor):
                self.tensors.append(len(leaves))
            elif kind is tuple or kind is list:
                parts.append((kind, None, self._take_apart(value)))
                continue
            elif kind is dict:
                parts.append((kind, tuple(value), self._take_apart(value.values())))
                continue
            elif kind not in _VALUES:
                if is_container(kind):
                    raise _Registered
                self.objects.append(value)
            parts.append(None)
            leaves.append(value)
        return parts

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Give args and kwargs with these leaves; containers are made anew each time."""
        values = leaves if self._structure is None else _close(self._structure, leaves)
        if not self._keywords:
            return values, {}
        positional = self._positional
        return values[:positional], dict(zip(self._keywords, values[positional:], strict=True))

    def describe(self, index: int) -> str:
        """Name leaf `index` as its caller wrote it: ``argument 0``, ``argument 'mask'``, ``argument 'cache'[0]``."""
        place, rest = index, ""
        if self._structure is not None:
            spec = self._structure
            if isinstance(spec, list):
                _, spec = flatten(_build(spec, count()))
            place, rest = leaf_paths(spec)[index]
        if place < self._positional:
            return f"argument {place}{rest}"
        return f"argument '{self._keywords[place - self._positional]}'{rest}"


class _Registered(Exception):  # noqa: N818 (not an error)
    """A container of a class that only the pytree library knows."""


def _close(structure: Parts | Spec, leaves: Sequence[Any]) -> list[Any]:
    return _build(structure, iter(leaves)) if isinstance(structure, list) else unflatten(leaves, structure)


def _build(parts: Parts, leaves: Iterator[Any]) -> list[Any]:
    """Put values together again."""
    values: list[Any] = []
    for part in parts:
        if part is None:
            values.append(next(leaves))
            continue
        kind, keys, inner = part
        built = _build(inner, leaves)
        values.append(built if kind is list else tuple(built) if keys is None else dict(zip(keys, built, strict=True)))
    return values
