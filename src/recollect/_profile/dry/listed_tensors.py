"""Fake tensors whose numbers are read or written past the operators.

In lists that become a tensor (``torch.tensor([a.max(), b.max()])``), and as arrays of NumPy, where SciPy is given one:
a detector matches its boxes so. And ``ctc_loss``, given lists of lengths, writes them into a tensor that has no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recollect._core.torch_private.fake import is_fake

_WITH_LENGTHS = (torch.nn.functional.ctc_loss, torch.ctc_loss)
_LENGTHS = {2: "input_lengths", 3: "target_lengths"}
_READERS: frozenset[object] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class ListedTensors(TorchFunctionMode):
    """Has each of them read as a number is, by an operator, which is answered or refused."""

    is_transparent = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function."""
        del types
        kwargs = kwargs or {}
        if func in _READERS and args and isinstance(args[0], (list, tuple)):
            args = (_as_numbers(args[0]), *args[1:])
        if func is Tensor.__array__ and is_fake(args[0]) and args[0].is_floating_point():
            import numpy as np

            return np.array(args[0].tolist(), str(args[0].dtype).removeprefix("torch."))
        if func in _WITH_LENGTHS:
            args = tuple(_as_tensor(value) if at in _LENGTHS else value for at, value in enumerate(args))
            kwargs = {key: _as_tensor(value) if key in _LENGTHS.values() else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _as_tensor(lengths: Any) -> Any:
    return torch.tensor(_as_numbers(lengths)) if isinstance(lengths, (list, tuple)) else lengths


def _as_numbers(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_as_numbers(value) for value in values]
    return values.tolist() if isinstance(values, Tensor) and is_fake(values) else values
