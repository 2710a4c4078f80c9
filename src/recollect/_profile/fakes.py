"""Fake tensors in place of others: same shapes, dtypes and sharing of memory, and no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.argument_text import with_article
from recollect._core.operators import is_wrapper, parts_of
from recollect._core.pytree import Arguments
from recollect._core.torch_private.fake import is_fake, is_uninitialized, storage_key


class Fakes:
    """Makes fake tensors in place of others: the same for the same, on one storage where they share one.

    Args:
        dtype: of all that are floating-point; None: as they are.
        on_meta: whether they are to be on ``meta``, which needs no mode and is ten times as quick; tensors that wrap
            one other are then taken as that.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, on_meta: bool = False) -> None:
        self._dtype, self._on_meta = dtype, on_meta
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor it stands for, whose identity is the key

    def of(self, tensor: Tensor) -> Tensor:
        """The fake tensor for this one; itself if it is one. To be called inside the mode, unless it is on meta."""
        if is_fake(tensor) or (self._on_meta and tensor.is_meta):
            return tensor
        found = self._made.get(id(tensor))
        if found is None:
            found = self._made[id(tensor)] = (tensor, self._make(tensor))
        return found[1]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, and the fake one for it."""
        return list(self._made.values())

    def of_all(self, value: Any) -> Any:
        """The same value with fake tensors, in containers too."""
        arguments = Arguments((value,), {})
        leaves = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
        args, _ = arguments.rebuild(leaves)
        return args[0]

    def _make(self, tensor: Tensor) -> Tensor:
        inside = parts_of(tensor) if self._on_meta and is_wrapper(tensor) else []
        plain = inside[0] if len(inside) == 1 else tensor
        _check_kind(plain)
        with torch.no_grad():
            fake = self._view(plain)
            if isinstance(tensor, nn.Parameter):
                parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                parameter.__dict__.update(tensor.__dict__)
                return parameter
        return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fake

    def _view(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        key = (storage_key(tensor), dtype)
        base = self._bases.get(key)
        if base is None:
            count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            base = self._bases[key] = torch.empty(count, dtype=dtype, device="meta" if self._on_meta else "cpu")
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


def _check_kind(tensor: Tensor) -> None:
    if is_uninitialized(tensor):
        message = (
            "a lazy module has parameters whose shapes are not known yet: before a dry profile, run it once on "
            "real inputs, or give the shapes when you build it"
        )
        raise ValueError(message)
    if tensor.layout is not torch.strided or is_wrapper(tensor) or tensor.is_quantized:
        message = (
            "a dry profile supports plain tensors only, but the model or its inputs hold "
            f"{with_article(type(tensor).__name__)} with layout {tensor.layout}. Profile a real step: dry=False"
        )
        raise ValueError(message)
