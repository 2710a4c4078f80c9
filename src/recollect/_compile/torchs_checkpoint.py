"""Lets Dynamo trace what stands in for ``torch.utils.checkpoint.checkpoint`` as any function.

Dynamo knows torch's function by identity, as whatever is found under that name, and makes torch's own operator of it.

Would be replaced by: a way to tell Dynamo that a function is to be traced, whatever its name.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def trace_as_written(fn: Callable[..., Any]) -> Callable[[], None]:
    """Let Dynamo look into this function, which torch's name for its own one leads to; gives what undoes it."""
    from torch._dynamo.variables import builder

    found: Any = builder
    before = found.is_utils_checkpoint

    def is_torchs(value: Any) -> bool:
        return value is not fn and before(value)

    found.is_utils_checkpoint = is_torchs

    def undo() -> None:
        if found.is_utils_checkpoint is is_torchs:
            found.is_utils_checkpoint = before

    return undo
