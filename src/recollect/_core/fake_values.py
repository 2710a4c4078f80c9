"""What is known of the values of a fake tensor, noted on it: its copies know it, too."""

from __future__ import annotations

from torch import Tensor, UntypedStorage

_VALUE, _LOST = "_recollect_value", "_recollect_lost"


def set_value(fake: Tensor, real: Tensor) -> None:
    """A fake tensor has the values of this one, which is written into together with it."""
    setattr(fake, _VALUE, real)


def lose_values(storage: UntypedStorage) -> None:
    """Unknown values were written into fake tensors on this memory: nothing is known of them any more."""
    setattr(storage, _LOST, True)


def has_value(tensor: Tensor) -> bool:
    """Whether this is a fake tensor whose values are known."""
    return _VALUE in vars(tensor) and not hasattr(tensor.untyped_storage(), _LOST)


def value_of(tensor: Tensor) -> Tensor:
    """The values that a fake tensor is known to have; a real one as it is."""
    known: Tensor = vars(tensor).get(_VALUE, tensor)
    return known


def copy_value(tensor: Tensor, copied: Tensor) -> None:
    """One tensor is a copy of another: what is known of that is known of it, too. For use outside of all modes."""
    if has_value(tensor):
        set_value(copied, value_of(tensor).clone())
