"""Version counters of tensors: how often they were written into, set back where their bytes are restored.

Private names: ``Tensor._version`` and ``torch._C._autograd._unsafe_set_version_counter``.
Would be replaced by: a public way to undo writes.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """The number of writes; 0 for inference tensors, which count none."""
    return 0 if tensor.is_inference() else tensor._version


def set_version(tensor: Tensor, version: int) -> None:
    """Let a tensor count from there, so that graphs which saved it before may run."""
    if not tensor.is_inference() and tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
