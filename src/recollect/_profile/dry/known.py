"""What is known of values in a dry step: the whole numbers and masks that it is given, and what is made of those alone.

Models ask whether a mask is true everywhere and leave it out if it is, count the tokens of a batch, or look for the
longest sequence. The batch is there, so the answer is that of the real step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recollect._core.operators import Operator, storages_in, tensors_in
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.pytree import flatten, unflatten

_NAME = "_recollect_value"
_MOST = 1 << 22  # elements: more take too long
_MAKING = ("aten.arange.", "aten.zeros.", "aten.ones.", "aten.full.", "aten.scalar_tensor.")


def note_value(fake: Tensor, real: Tensor) -> None:
    """A fake tensor stands for this one, which has values."""
    if _is_small(real) and not real.is_meta:
        with without_dispatch_modes():
            setattr(fake, _NAME, real.detach().cpu())


def _is_small(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST


class KnownValues:
    """Computes with known values beside a dry step."""

    def __init__(self) -> None:
        self._written: WeakKeyDictionary[torch.UntypedStorage, None] = WeakKeyDictionary()

    def compute(
        self, func: Callable[..., Any], operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What an operator gives, if all that it is given is known; NotImplemented if not."""
        if operator.writes:
            self._written.update((storage, None) for storage in storages_in(args, kwargs))
            return NotImplemented
        if operator.is_random or any(isinstance(value, Tensor) and _NAME not in vars(value) for value in args):
            return NotImplemented  # the usual case
        given = tensors_in(args, kwargs)
        if not given or not all(map(self._is_known, given)):
            return NotImplemented
        leaves, spec = flatten([args, kwargs])
        real = [getattr(leaf, _NAME) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with without_dispatch_modes():
            known, named = unflatten(real, spec)
            return func(*known, **named)

    def note_made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator gave this: if it makes whole numbers out of none, they are known."""
        if isinstance(result, Tensor) and _is_small(result) and str(func).startswith(_MAKING):
            with without_dispatch_modes():
                note_value(result, func(*args, **{**kwargs, "device": torch.device("cpu")}))

    def _is_known(self, tensor: Tensor) -> bool:
        return hasattr(tensor, _NAME) and tensor.untyped_storage() not in self._written
