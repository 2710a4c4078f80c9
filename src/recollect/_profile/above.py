"""Lets a capture see operators where another mode lies above it: those of optimizers that step without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recollect._core.operators import operator_of
from recollect._core.torch_private.dispatch import DispatchMode

if TYPE_CHECKING:
    from recollect._profile.capture import Capture


class Above(DispatchMode):
    """Lets a capture see operators where another mode lies above it."""

    looks_beneath = True

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and write it down.

        One that writes into lists of tensors is not run: it gives nothing new, and torch takes 0.1 ms for each tensor.
        """
        operator = operator_of(func)
        if operator.writes and operator.name.startswith("aten._foreach_"):
            self._capture.write(operator, args, kwargs)
            return None
        return self._capture.meet(func, args, kwargs)
