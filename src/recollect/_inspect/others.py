"""What the process holds on a step's device beside the step: averages of weights, teachers, models of earlier cells.

A budget is for all of it, as the device is. The step itself never meets these tensors, so only the allocator tells of
them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from recollect._core.calls import Category, Lifetime, Storage
from recollect._inspect.surroundings import read_requested_bytes
from recollect._profile.storage_log import StorageLog
from recollect._profile.storages import storages_of

LEAST_BYTES = 2**20
"""Less than that is noise: states of generators, what libraries round."""


def find_other_bytes(device: torch.device, log: StorageLog, aside: Iterable[Tensor] = (), fixed_bytes: int = 0) -> int:
    """What is in use on a device beside what is known; 0 where nobody tells, or if it is next to nothing.

    If there is some, the garbage collector runs first: what it frees is not there in later steps.

    Args:
        device: of the step.
        log: what the step has met.
        aside: tensors that are there only because the step is profiled.
        fixed_bytes: what libraries hold.
    """
    aside = list(aside)
    found = _read(device, log, aside, fixed_bytes)
    if found >= LEAST_BYTES:
        gc.collect()
        found = _read(device, log, aside, fixed_bytes)
    return found if found >= LEAST_BYTES else 0


def as_storage(other_bytes: int) -> Storage:
    """Them as one of the storages of a step: there before it and after it."""
    return Storage(
        bytes=other_bytes, lifetime=Lifetime.STEP, name="tensors that the step does not use", category=Category.OTHER
    )


def _read(device: torch.device, log: StorageLog, aside: Iterable[Tensor], fixed_bytes: int) -> int:
    in_use = read_requested_bytes(device)
    if not in_use:
        return 0
    kept = (storage for tensor in aside for storage, where in storages_of(tensor) if where == device)
    known = {id(storage): storage.nbytes() for storage in chain(log.list_live(device), kept)}
    return in_use - sum(known.values()) - fixed_bytes
