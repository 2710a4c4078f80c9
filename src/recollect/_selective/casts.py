"""Casts that calls make inside, as under autocast: which tensors can be one, and when they are held themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._selective.kept_call import has_same_bits
from recollect._selective.outlines import Outline
from recollect._selective.program import HELD, Cast, HeldCast, Inner, Program

if TYPE_CHECKING:
    from recollect._selective.recorded import RecordedCall, SavedTensor
    from recollect._selective.recording import Recording

# Autocast casts all that these are given: given a cast, they do the same.
_CASTING = frozenset(
    {
        *(functional.linear, functional.conv1d, functional.conv2d, functional.conv3d),
        *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
        *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm),
        *(Tensor.addmm, Tensor.baddbmm, Tensor.bmm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
    }
)


def hold_casts(raw: Program, held: list[Any], kept: set[int], saved: list[SavedTensor]) -> None:
    """Hold casts of kept values instead of the values, where nothing but casts is asked for and they take no more.

    Products that are made again may take a value too: they are given the cast in its place.

    Args:
        raw: what to call for what; changed.
        held: by number, what is held; changed.
        kept: the numbers that a policy keeps.
        saved: all saved tensors.
    """
    bases = [number if view is None else view.number for number, view in enumerate(raw.views)]
    casts: defaultdict[int, list[tuple[int, Cast]]] = defaultdict(list)
    for at, source in enumerate(raw.sources):
        is_remade = isinstance(source, Inner) and raw.calls[source.call].func in _CASTING
        cast = source if isinstance(source, Cast) else saved[at].cast if is_remade else None
        if cast is not None:
            casts[bases[cast.number]].append((at, cast))
    uses = raw.count_uses(list(range(len(raw.sources))), held)
    for number in kept.intersection(casts):
        mine = casts[number]
        remade = {cast.call: at for at, cast in mine if isinstance(raw.sources[at], Inner)}
        taken = sum(bases[link] == number for index in remade for link in raw.calls[index].links)
        size = sum(cast.count_bytes() for _, cast in mine)
        is_cast_alone = uses[number] == len(mine) - len(remade) + taken
        is_wider = any(isinstance(saved[at].tensor, Outline) for at, _ in mine)
        if not is_cast_alone or is_wider or size > held[number].numel() * held[number].element_size():
            continue
        if remade:
            at = min(remade.values())
            cast_to = saved[at].tensor
            assert isinstance(cast_to, Tensor), "casts of kept values are held"
            if any(cast.is_copied for _, cast in mine) or not _is_whole(cast_to, held[number]):
                continue
            kind = (cast_to.dtype, cast_to.shape, cast_to.stride())
            origin = held[number]
            raw.held_casts[at] = HeldCast(number, kind, origin.shape, origin.stride(), 0)
            held[number] = raw.held_casts[at].find_value(cast_to.detach())
        else:
            held[number] = None
        for at, _ in mine:
            raw.sources[at] = HELD


def hold_weight_casts(raw: Program, held: list[Any], saved: list[SavedTensor]) -> None:
    """Hold what products have made of parameters, as a plain step does; products that are made again are given it.

    Args:
        raw: what to call for what; changed.
        held: by number, what is held; changed.
        saved: all saved tensors.
    """
    casts: defaultdict[int, list[tuple[int, Cast]]] = defaultdict(list)
    for at, one in enumerate(saved):
        cast = one.cast
        if cast is not None and is_weight(held[cast.number]) and raw.calls[cast.call].func in _CASTING:
            casts[cast.number].append((at, cast))
    uses = raw.count_uses(list(range(len(raw.sources))), held)
    for number, mine in casts.items():
        remade = {cast.call: (at, cast) for at, cast in mine if isinstance(raw.sources[at], Inner)}
        taken = sum(link == number for index in remade for link in raw.calls[index].links)
        if remade and (uses[number] != len(mine) - len(remade) + taken or any(cast.is_copied for _, cast in mine)):
            mine = [(at, cast) for at, cast in mine if cast.call not in remade]  # noqa: PLW2901 (the rest is cast again)
        elif remade:
            at, cast = min(remade.values(), key=lambda pair: pair[0])
            tensor, origin = saved[at].tensor, held[number]
            assert isinstance(tensor, Tensor), "casts of weights are held"
            stride = torch.empty_like(origin, dtype=tensor.dtype, device="meta").stride()
            raw.held_casts[at] = HeldCast(number, cast.kind, origin.shape, stride, cast.steps)
            held[number] = raw.held_casts[at].find_value(tensor.detach())
        for at, _ in mine:
            raw.sources[at] = HELD


def is_weight(tensor: Any) -> bool:
    """Whether a tensor from outside of a region is a parameter."""
    return isinstance(tensor, Parameter)


def _is_whole(cast: Tensor, origin: Tensor) -> bool:
    """Whether a cast can be viewed as all of the other."""
    return cast.numel() == origin.numel() and cast.is_contiguous() and origin.is_contiguous()


def find_cast(recording: Recording, tensor: Tensor, entry: RecordedCall) -> Cast | None:
    """How a tensor that a call saved inside is a cast or copy of one of its arguments; None if it is none."""
    number, is_copied = _find_origin(recording, tensor, entry)
    if number is None:
        return None
    kind, steps = (tensor.dtype, tensor.shape, tensor.stride()), int(tensor.storage_offset())
    return Cast(number, recording.entries.index(entry), kind, steps, is_copied=is_copied)


def _find_origin(recording: Recording, tensor: Tensor, entry: RecordedCall) -> tuple[int | None, bool]:
    """The argument that was cast or copied to this tensor, and whether it was copied.

    Equal values prove nothing: two arguments may both be zero. What is not seen to be cast is a parameter that
    autocast has cast before, and then the only argument that this can be.
    """
    storage, dtype, is_copied = tensor.untyped_storage(), tensor.dtype, False
    for origin, copy in reversed(entry.copies):
        if copy() is storage:
            is_copied = is_copied or origin.dtype == dtype
            number = recording.number_of(origin)
            if number is not None:
                return (number if number in entry.links else None), is_copied
            storage, dtype = origin.untyped_storage(), origin.dtype
    if storage is not tensor.untyped_storage():
        return None, is_copied
    able = [number for number in dict.fromkeys(entry.links) if _may_be_cast(recording.tensors[number], tensor)]
    origin = recording.tensors[able[0]] if len(able) == 1 else None
    if not (isinstance(origin, Tensor) and origin.is_leaf and origin.requires_grad):
        return None, False
    if recording.classes.can_compare:
        with without_dispatch_modes(), torch.no_grad():
            made = origin.to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            return (able[0] if has_same_bits(made, tensor) else None), False
    return able[0], False


def _may_be_cast(origin: Tensor | Outline, tensor: Tensor) -> bool:
    """Whether one tensor can be a cast of the other, by their dtypes and sizes."""
    is_cast = origin.dtype != tensor.dtype and origin.is_floating_point() and tensor.is_floating_point()
    return is_cast and tensor.untyped_storage().nbytes() == origin.numel() * tensor.element_size()
