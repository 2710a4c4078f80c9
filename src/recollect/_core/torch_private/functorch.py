"""torch.func's interpreter stack: whether a transform is active, and which tensors it tracks.

Would be replaced by: public predicates for the same.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_functorch = torch._C._functorch

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether code runs inside `torch.func.grad`, `vmap`, `jvp` or one of their kin. Costs 50 ns."""


def is_tracked(tensor: Tensor) -> bool:
    """Whether a transform wraps this tensor."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def level_of(tensor: Tensor) -> int:
    """Level of the innermost transform that wraps this tensor; -1 where none does, -2 where it has ended."""
    return int(_functorch.maybe_get_level(tensor))


def current_level() -> int:
    """Level of the innermost active transform; 0 where none is."""
    level = _functorch.maybe_current_level()
    return 0 if level is None else int(level)


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor beneath all wrappers."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


unwrap_if_ended: Callable[[Tensor], Tensor] = _functorch.unwrap_if_dead
"""The tensor without the wrapper of a transform that has ended, which ordinary operators see through anyway."""
