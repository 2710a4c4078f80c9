"""Fake tensors whose numbers are read past the operators.

In lists that become a tensor (``torch.tensor([a.max(), b.max()])``), and as arrays of NumPy, where SciPy is given one:
a detector matches its boxes so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recollect._core.torch_private.fake import is_fake

_READERS: frozenset[object] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class ListedTensors(TorchFunctionMode):
    """Has each of them read as a number is, by an operator, which is answered or refused."""

    is_transparent = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function."""
        del types
        if func in _READERS and args and isinstance(args[0], (list, tuple)):
            args = (_as_numbers(args[0]), *args[1:])
        if func is Tensor.__array__ and is_fake(args[0]) and args[0].is_floating_point():
            import numpy as np

            return np.array(args[0].tolist(), str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def _as_numbers(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_as_numbers(value) for value in values]
    return values.tolist() if isinstance(values, Tensor) and is_fake(values) else values
