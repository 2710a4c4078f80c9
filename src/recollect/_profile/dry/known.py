"""What is known of values in a dry step: the whole numbers and masks that it is given, and what is made of those alone.

Constants that the step makes itself are known, too.

Models ask whether a mask is true everywhere and leave it out if it is, count the tokens of a batch, or look for the
longest sequence. The batch is there, so the answer is that of the real step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recollect._core.fake_values import has_value, lose_values, set_value, value_of
from recollect._core.operators import Operator, storages_in, tensors_in
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.fake import is_fake
from recollect._core.torch_private.pytree import flatten, unflatten

MOST_KNOWN = 1 << 22
"""Elements of a tensor whose values are known: more take too long."""
_MAKING = ("aten.arange.", "aten.zeros.", "aten.ones.", "aten.full.", "aten.scalar_tensor.")


def note_value(fake: Tensor, real: Tensor) -> None:
    """A fake tensor stands for this one, which is given; if it holds whole numbers, they are known."""
    if not (real.is_floating_point() or real.is_complex() or real.is_meta) and real.numel() <= MOST_KNOWN:
        with without_dispatch_modes():
            note_known(fake, real.detach().clone())  # what writes into the fake writes into this


def note_known(fake: Tensor, real: Tensor) -> None:
    """A fake tensor has these values, which were made of known ones."""
    if real.numel() <= MOST_KNOWN and not real.is_meta:
        with without_dispatch_modes():
            set_value(fake, real.detach().cpu())


class KnownValues:
    """Computes with known values beside a dry step."""

    def __init__(self) -> None:
        self._written: WeakKeyDictionary[torch.UntypedStorage, None] = WeakKeyDictionary()  # of the user's tensors

    def compute(
        self, func: Callable[..., Any], operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What an operator gives, if all that it is given is known; NotImplemented if not."""
        if operator.writes:
            self._write(func, operator, args, kwargs)
            return NotImplemented
        if operator.is_random or not self._are_known(args, kwargs):
            return NotImplemented
        with without_dispatch_modes():
            known, named = _as_real(args, kwargs)
            return func(*known, **named)

    def note_made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator gave this: if it makes numbers out of none, they are known."""
        if isinstance(result, Tensor) and str(func).startswith(_MAKING) and result.numel() <= MOST_KNOWN:
            with without_dispatch_modes():
                note_known(result, func(*args, **{**kwargs, "device": torch.device("cpu")}))

    def _write(
        self, func: Callable[..., Any], operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An operator writes: known values into known ones and all their views; else those are known no more."""
        found = (args[at] if at < len(args) else kwargs.get(name) for at, name in operator.writes)
        targets = [target for target in found if target is not None]
        is_ours = all(isinstance(target, Tensor) and is_fake(target) for target in targets)
        if is_ours and not operator.is_random and self._are_known(args, kwargs):
            with without_dispatch_modes():
                known, named = _as_real(args, kwargs)
                func(*known, **named)
        else:
            for target in tensors_in(targets):
                for storage in storages_in(target):
                    if is_fake(target):
                        lose_values(storage)
                    else:
                        self._written[storage] = None

    def largest(self, numbers: Tensor) -> int | None:
        """The largest of some whole numbers; None where they are not known."""
        if not numbers.numel() or not self._is_known(numbers):
            return None
        with without_dispatch_modes():
            return int(value_of(numbers).max())

    def count_true(self, mask: Tensor) -> int | None:
        """How often a mask is true; None where that is not known."""
        if not self._is_known(mask):
            return None
        with without_dispatch_modes():
            return int(value_of(mask).count_nonzero())

    def _are_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if any(isinstance(value, Tensor) and not self._is_known(value) for value in args):
            return False  # the usual case
        given = tensors_in(args, kwargs)
        return bool(given) and all(map(self._is_known, given))

    def _is_known(self, tensor: Tensor) -> bool:
        if is_fake(tensor):
            return has_value(tensor)
        return not tensor.is_meta and tensor.numel() <= MOST_KNOWN and tensor.untyped_storage() not in self._written


def _as_real(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = flatten([args, kwargs])
    return unflatten([value_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
