"""Casts that calls make inside, as under autocast: which tensors can be one, and when they are held themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recollect._selective.program import HELD, Cast, HeldCast, Inner, Program

# Autocast casts all that these are given: given a cast, they do the same.
_CASTING = frozenset(
    {
        *(functional.linear, functional.conv1d, functional.conv2d, functional.conv3d),
        *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm),
        *(Tensor.addmm, Tensor.baddbmm, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
    }
)


def hold_casts(
    raw: Program, held: list[Any], kept: set[int], saved: list[Tensor], find_cast: Callable[[int], Cast | None]
) -> None:
    """Hold casts of kept values instead of the values, where nothing but casts is asked for and they take no more.

    Products that are made again may take a value too: they are given the cast in its place.

    Args:
        raw: what to call for what; changed.
        held: by number, what is held; changed.
        kept: the numbers that a policy keeps.
        saved: all saved tensors.
        find_cast: how a saved tensor, by its index, was cast.
    """
    bases = [number if view is None else view.number for number, view in enumerate(raw.views)]
    casts: defaultdict[int, list[tuple[int, Cast]]] = defaultdict(list)
    for at, source in enumerate(raw.sources):
        is_remade = isinstance(source, Inner) and raw.calls[source.call].func in _CASTING
        cast = source if isinstance(source, Cast) else find_cast(at) if is_remade else None
        if cast is not None:
            casts[bases[cast.number]].append((at, cast))
    uses = raw.count_uses(list(range(len(raw.sources))), held)
    for number in kept.intersection(casts):
        mine = casts[number]
        remade = {cast.call: at for at, cast in mine if isinstance(raw.sources[at], Inner)}
        taken = sum(bases[link] == number for index in remade for link in raw.calls[index].links)
        size = sum(cast.count_bytes() for _, cast in mine)
        is_cast_alone = uses[number] == len(mine) - len(remade) + taken
        if not is_cast_alone or size > held[number].numel() * held[number].element_size():
            continue
        if remade:
            at = min(remade.values())
            if any(cast.is_copied for _, cast in mine) or not _is_whole(saved[at], held[number]):
                continue
            shape, kind = held[number].shape, (saved[at].dtype, saved[at].shape, saved[at].stride())
            raw.held_casts[at] = HeldCast(number, shape, kind)
            held[number] = saved[at].detach().view(shape)
        else:
            held[number] = None
        for at, _ in mine:
            raw.sources[at] = HELD


def _is_whole(cast: Tensor, origin: Tensor) -> bool:
    """Whether a cast can be viewed as all of the other."""
    return cast.numel() == origin.numel() and cast.is_contiguous() and origin.is_contiguous()


def may_be_cast(origin: Tensor, tensor: Tensor) -> bool:
    """Whether one tensor can be a cast of the other, by their dtypes and sizes."""
    is_cast = origin.dtype != tensor.dtype and origin.is_floating_point() and tensor.is_floating_point()
    return is_cast and tensor.untyped_storage().nbytes() == origin.numel() * tensor.element_size()
