"""Functions of torch that are written in Python and make calls of torch themselves, run so that modes see those calls.

Such a function asks whether a torch-function mode is on, and if so hands itself to it as one call: then nothing
inside attention can be told apart. Here it runs with globals of its own, in which the answer is no. Others, such as
those for single layers, make one call each and need nothing.

Private names: ``has_torch_function`` in the globals of ``multi_head_attention_forward``; ``_in_projection`` and
``_in_projection_packed`` beside it, which it calls.
Would be replaced by: torch-function modes that are asked whether they want to see a function or its calls.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from torch.nn import functional

ATTENTION: Any = functional.multi_head_attention_forward
"""The one of them that counts."""

_INSIDE = (ATTENTION, getattr(functional, "_in_projection", None), getattr(functional, "_in_projection_packed", None))
CODES: frozenset[CodeType] = frozenset(one.__code__ for one in _INSIDE if isinstance(one, FunctionType))
"""The code whose calls of torch count as the user's."""


def run_open(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run attention so that modes see what it calls."""
    names = {**ATTENTION.__globals__, "has_torch_function": _never}
    inside = FunctionType(ATTENTION.__code__, names, ATTENTION.__name__, ATTENTION.__defaults__, ATTENTION.__closure__)
    inside.__kwdefaults__ = ATTENTION.__kwdefaults__
    return inside(*args, **kwargs)


def _never(_tensors: Any) -> bool:
    return False
