"""What a module's class has under the name ``forward``."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
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


def functions_in(module: nn.Module) -> Iterator[str]:
    """The functions of `torch.nn.functional` that a module's ``forward`` names, once for each place that names them.

    Those of torch's own modules are left out, and names of the module's own attributes: ``self.gelu`` is a part.

    >>> class Gated(nn.Module):
    ...     def forward(self, x):
    ...         return nn.functional.silu(x) * nn.functional.silu(-x)
    >>> list(functions_in(Gated()))
    ['silu', 'silu']
    """
    forward = forward_of(type(module))
    code = getattr(inspect.unwrap(forward) if callable(forward) else forward, "__code__", None)
    if code is None or type(module).__module__.startswith("torch."):
        return
    named = {name for name in code.co_names if hasattr(nn.functional, name) and not hasattr(module, name)}
    if named:
        yield from (at.argval for at in dis.get_instructions(code) if isinstance(at.argval, str) and at.argval in named)
