"""How much of the activations torch's compiler may keep, for as long as a block runs.

A setting of ``torch._functorch.config``, which no public name leads to; ``torch.compile`` would have to take it as an
option. Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._functorch import config


def use_memory_budget(share: float) -> AbstractContextManager[Any]:
    """Let graphs that are compiled inside keep this part of what they would keep by themselves; 1 is all."""
    patched: AbstractContextManager[Any] = config.patch(activation_memory_budget=share)
    return patched
