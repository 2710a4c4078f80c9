"""What a module's class has under the name ``forward``."""

from __future__ import annotations

from typing import Any

from torch import nn


def forward_of(kind: type[nn.Module]) -> Any:
    """The class's ``forward`` as it is written there: a function, a static method, a property."""
    return next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))


def is_called(module: nn.Module) -> bool:
    """Whether a module has a ``forward``; a list of modules has none, unless its class gives it one.

    >>> is_called(nn.Linear(1, 1)), is_called(nn.ModuleList())
    (True, False)
    """
    return forward_of(type(module)) is not vars(nn.Module)["forward"] or "forward" in vars(module)
