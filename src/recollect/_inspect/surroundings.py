"""What a step runs in: its device, its random generators, the garbage collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recollect._core.profiles import AllocatorEntry
from recollect._core.torch_private.pytree import tree_leaves
from recollect._recompute.rng import (
    Source,
    accelerator,
    accelerator_started,
    host_sources,
    parse_preserve,
    source_of_device,
)

if TYPE_CHECKING:
    from recollect._profile.allocations import AllocationMeter
    from recollect._profile.dry.roofline import Device
    from recollect._profile.dry.translate import Translation

_NEVER = 10**9


@contextmanager
def quick_collections() -> Iterator[None]:
    """Let the garbage collector look at young objects only: what a profile notes makes it run more often.

    Measured: up to 0.15 s of a 0.45 s profile, each time that it looks through all of torch.
    """
    with _collecting.lock:
        if not _collecting.depth:
            _collecting.before = gc.get_threshold()
            gc.set_threshold(*_collecting.before[:2], _NEVER)
        _collecting.depth += 1
    try:
        yield
    finally:
        with _collecting.lock:
            _collecting.depth -= 1
            if not _collecting.depth:
                gc.set_threshold(*_collecting.before)


class _Collecting:
    """How many profiles run, on any thread, and what the collector was set to before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before = (0, 0, 0)


_collecting = _Collecting()


def device_of(modules: Sequence[nn.Module], inputs: Any) -> torch.device:
    """The device that a step runs on: that of its parameters and inputs; the CPU only if all are there."""
    tensors = [next(module.parameters(), None) for module in modules] + tree_leaves(inputs)
    devices = [tensor.device for tensor in tensors if isinstance(tensor, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def describe_device(device: torch.device) -> str:
    """What reports call a device that is here."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def list_generators() -> list[Source]:
    """All random generators that a step may draw from without being given one."""
    sources = [*host_sources(parse_preserve(True))]  # noqa: FBT003
    found = accelerator()
    if found is not None and accelerator_started():
        devices = [torch.device(found[0], index) for index in range(torch.accelerator.device_count())]
        sources += [source for device in devices if (source := source_of_device(device)) is not None]
    return sources


def read_allocator(device: torch.device, meter: AllocationMeter | None) -> tuple[AllocatorEntry, ...]:
    """What a device's allocator says of the step that has just run; nothing on the host."""
    if device.type != "cuda":
        return ()
    measured = 0 if meter is None else meter.peak_bytes
    entry = AllocatorEntry(
        device=torch.cuda.get_device_name(device),
        peak_bytes=max(torch.cuda.max_memory_allocated(device), measured),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        total_bytes=torch.cuda.get_device_properties(device).total_memory,
    )
    return (entry,)


def read_requested_bytes(device: torch.device) -> int:
    """What tensors take on a device now, without what its allocator adds; 0 where it does not tell, as on the host."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0))


def memory_model_of(device: torch.device) -> Translation | None:
    """What is known of workspaces and rounding on a device; nothing of the host."""
    if device.type != "cuda":
        return None
    from recollect._profile.dry.translate import workspaces_on

    return workspaces_on(device)


def known_device(device: torch.device) -> Device | None:
    """What is known of a device's speed; None of one that nobody has measured."""
    from recollect._profile.dry.roofline import find_device

    with suppress(ValueError):
        return find_device(device)
    return None
