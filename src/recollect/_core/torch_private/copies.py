"""Memory for tensors, and copies between lists of them, with little work for the host.

Private names: ``torch._C._dynamo.guards._empty_strided_{cpu,cuda,xpu}``, by which compiled code allocates (0.9 µs where
`torch.empty_strided` takes 3.5); ``torch._C._cuda_getDevice``; ``torch._foreach_copy_`` (0.8 µs for each copy where
`Tensor.copy_` takes 2.5, both on host tensors).
Would be replaced by: a public call that allocates with as little overhead, and a public one for many copies.
Run on: torch 2.11, 2.13 (CPU builds; on CUDA by the tests marked ``gpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_guards: Any = torch._C._dynamo.guards

Shape = tuple[int, ...]


def memory_maker(
    device: torch.device, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Something that makes tensors of one kind, with memory that has nothing in it yet.

    No mode sees them being made.
    """
    sizes, steps = tuple(shape), tuple(stride)  # a torch.Size will not do

    def make() -> Tensor:
        return torch.empty_strided(sizes, steps, dtype=dtype, device=device)

    quick: Callable[[Shape, Shape, torch.dtype], Tensor] | None = getattr(
        _guards, f"_empty_strided_{device.type}", None
    )
    if quick is None or device.type not in ("cpu", "cuda"):
        return make
    if device.type == "cpu":
        return lambda: quick(sizes, steps, dtype)
    index, current = device.index, torch._C._cuda_getDevice

    def make_there() -> Tensor:  # on the device that is current, and on no other
        return quick(sizes, steps, dtype) if current() == index else make()

    return make_there


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, in their order, on the stream that is current; the host does not wait."""
    torch._foreach_copy_(targets, sources, non_blocking=True)
