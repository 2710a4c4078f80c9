"""Which attributes a module's forward reads before it sets them: what it carries from one call to the next.

Told by the order in which its code names them, methods that it calls included. Loops and branches are not followed, and
an attribute counts whichever object it is of.
"""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType

from torch import nn

_DEEPEST = 3  # methods that call each other


def carries(kind: type[nn.Module], name: str) -> bool:
    """Whether the forward of a class may read an attribute that an earlier call has set.

    >>> class Recurrent(nn.Module):
    ...     def forward(self, x):
    ...         self.state = x + self.state
    ...         self.result = self.state.exp()
    ...         return self.result
    >>> carries(Recurrent, "state"), carries(Recurrent, "result")
    (True, False)
    """
    return _reads_first(kind, kind.forward, name, _DEEPEST)


def _reads_first(kind: type, method: object, name: str, depth: int) -> bool:
    method = inspect.unwrap(method) if type(method) is FunctionType else method
    if type(method) is not FunctionType:
        return False
    for named, is_set in _attributes_of(method.__code__):
        if named == name:
            return not is_set
        if not is_set and depth and _reads_first(kind, getattr(kind, named, None), name, depth - 1):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def _attributes_of(code: CodeType) -> tuple[tuple[str, bool], ...]:
    """Attributes in the order in which code first names them, functions within it included; whether it sets them."""
    found: dict[str, bool] = {}
    for step in dis.get_instructions(code):
        if step.opname in {"STORE_ATTR", "DELETE_ATTR"}:
            found.setdefault(step.argval, True)
        elif step.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
            found.setdefault(step.argval, False)
        elif isinstance(step.argval, CodeType):
            for named, is_set in _attributes_of(step.argval):
                found.setdefault(named, is_set)
    return tuple(found.items())
