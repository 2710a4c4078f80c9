"""What plain tensors are where a region runs: real ones, or those of a fake mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from recollect._core.torch_private.dispatch import fake_class


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClasses:
    """What plain tensors are where a region runs.

    Attributes:
        result: the class of what operators give.
        plain: all classes that can be vouched for.
        start: where a tensor starts in memory; of fake ones, where it would.
        can_compare: whether they have values.
    """

    result: type[Tensor]
    plain: frozenset[type[Tensor]]
    start: Callable[[Tensor], int]
    can_compare: bool


_REAL = TensorClasses(result=Tensor, plain=frozenset({Tensor, nn.Parameter}), start=Tensor.data_ptr, can_compare=True)


def tensor_classes(*, may_be_fake: bool) -> TensorClasses:
    """Those of this place."""
    fake = fake_class() if may_be_fake else None
    if fake is None:
        return _REAL
    return TensorClasses(result=fake, plain=_REAL.plain | {fake}, start=_start_of_fake, can_compare=False)


def _start_of_fake(tensor: Tensor) -> int:
    return (id(tensor.untyped_storage()) << 64) + int(tensor.storage_offset()) * tensor.element_size()
