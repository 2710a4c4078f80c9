"""Casts that calls make inside, as under autocast: which tensors can be one, and when they are held themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

from recollect._selective.program import HELD, Cast, Program


def hold_casts(raw: Program, held: list[Any], kept: set[int]) -> None:
    """Of kept values of which only casts are asked for, hold the casts instead, if they take no more."""
    casts: defaultdict[int, list[tuple[int, Cast]]] = defaultdict(list)
    for at, source in enumerate(raw.sources):
        if isinstance(source, Cast):
            view = raw.views[source.number]
            casts[source.number if view is None else view.number].append((at, source))
    uses = raw.count_uses(list(range(len(raw.sources))), held)
    for number in kept.intersection(casts):
        mine = casts[number]
        size = sum(cast.count_bytes() for _, cast in mine)
        if uses[number] == len(mine) and size <= held[number].numel() * held[number].element_size():
            held[number] = None
            for at, _ in mine:
                raw.sources[at] = HELD


def may_be_cast(origin: Tensor, tensor: Tensor) -> bool:
    """Whether one tensor can be a cast of the other, by their dtypes and sizes."""
    is_cast = origin.dtype != tensor.dtype and origin.is_floating_point() and tensor.is_floating_point()
    return is_cast and tensor.untyped_storage().nbytes() == origin.numel() * tensor.element_size()
