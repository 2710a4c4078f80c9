"""What a model was called with, without its tensors: to call it again on fake ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect._core.pytree import Arguments

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Stands for a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class GivenArguments:
    """The arguments of one call, and the autocast around it. Holds no tensor.

    Attributes:
        is_known: whether all of it can be given again: tensors, numbers, words and containers of these.
    """

    __slots__ = ("_arguments", "_autocast", "is_known")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._arguments = Arguments(tuple(args), kwargs)
        leaves = self._arguments.leaves
        self.is_known = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
        self._arguments.leaves = (
            [
                _Shape(shape=leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
            if self.is_known
            else []
        )
        self._arguments.objects = []
        kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        is_on = torch.is_autocast_enabled(kind)
        self._autocast = (kind, torch.get_autocast_dtype(kind)) if is_on else None

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with tensors on ``meta``."""
        leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
            if isinstance(leaf, _Shape)
            else leaf
            for leaf in self._arguments.leaves
        ]
        args, kwargs = self._arguments.rebuild(leaves)
        return tuple(args), kwargs

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast that was around the call."""
        if self._autocast is None:
            return nullcontext()
        kind, dtype = self._autocast
        return torch.autocast(kind, dtype=dtype)
