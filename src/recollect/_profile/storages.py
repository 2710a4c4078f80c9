"""Which storages tensors are made of, and which tensors an operator writes into."""

from typing import Any

import torch
from torch import Tensor

from recollect._core.operators import Operator
from recollect._core.torch_private.sparse import sparse_parts

Found = tuple[torch.UntypedStorage, torch.device]
"""A storage, and the device its bytes are on."""


def storages_in(value: Any) -> list[Found]:
    """The storages of all tensors in an operator's arguments or result."""
    found: list[Found] = []
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Tensor):
            found.extend(storages_of(part))
        elif isinstance(part, (tuple, list)):
            pending.extend(part)
        elif isinstance(part, dict):
            pending.extend(part.values())
    return found


def storages_of(tensor: Tensor) -> list[Found]:
    """The storages one tensor is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]  # among them a device mesh, of distributed ones
        return [found for part in parts if isinstance(part, Tensor) for found in storages_of(part)]
    if tensor.device.type == "meta":
        return []
    try:
        return [(tensor.untyped_storage(), tensor.device)]
    except NotImplementedError:  # sparse, or opaque (oneDNN's own layout, whose bytes cannot be asked for)
        return [found for part in sparse_parts(tensor) for found in storages_of(part)]


def tensors_written(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes into."""
    found: list[Tensor] = []
    for position, name in operator.writes or operator.statistics:
        value = args[position] if position < len(args) else kwargs.get(name)
        items = value if isinstance(value, (tuple, list)) else [value]
        found.extend(item for item in items if isinstance(item, Tensor))
    return found
