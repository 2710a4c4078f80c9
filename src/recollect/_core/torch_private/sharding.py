"""Whether a sharding engine swaps a module's parameters.

Private names: ``_is_fsdp_managed_module``, which both kinds of FSDP set on each module whose parameters they swap, for
the compiler's sake.
Replaced by: a public way to ask.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_managed"]


def is_managed(attributes: dict[str, Any]) -> bool:
    """Whether FSDP puts parameters into the module with this instance dictionary, and takes them away.

    >>> import torch
    >>> is_managed(vars(torch.nn.Linear(2, 2)))
    False
    """
    return "_is_fsdp_managed_module" in attributes
