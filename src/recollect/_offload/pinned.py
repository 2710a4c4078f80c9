"""A pool of pinned host memory: taken from the system in few large slabs, lent in pieces, never given back in between.

Pinning costs half a second per GiB, so a step must find what it needs already pinned: after the first steps nothing is
taken from the system any more. Slabs are powers of two, because torch rounds pinned memory up to that.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect._core.units import format_bytes
from recollect._offload.extents import Extents

ALIGNMENT = 4096  # what direct I/O to disks wants
_SMALLEST_SLAB = 2**20
_LARGEST_SLAB = 2**29


class Buffer:
    """A piece of a slab; who is done with it gives it back by `PinnedPool.give_back`.

    Attributes:
        bytes: the piece as a flat tensor of bytes.
        busy: marks of copies that may still read or write it; the next user waits for them.
        pool: what it is a piece of.
        slab: the number of its slab there.
        offset: where it lies in that.
    """

    __slots__ = ("busy", "bytes", "offset", "pool", "slab")

    def __init__(self, pool: PinnedPool, data: Tensor, slab: int, offset: int, busy: Sequence[Any]) -> None:
        self.pool, self.bytes, self.slab, self.offset, self.busy = pool, data, slab, offset, busy


def allocate_pinned(size: int) -> Tensor:
    """Bytes in host memory that a device can copy to and from by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def allocate_pageable(size: int) -> Tensor:
    """Plain bytes in host memory."""
    return torch.empty(size, dtype=torch.uint8)


def aligned_bytes(size: int) -> Tensor:
    """Plain host memory that starts at a block, so that direct I/O reads into it without a detour."""
    rounded = -(-size // ALIGNMENT) * ALIGNMENT
    whole = torch.empty(rounded + ALIGNMENT, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + rounded]


class PinnedPool:
    """Host memory in pieces, for any number of threads.

    Where the system refuses to pin, it warns once and goes on with pageable memory, to which copies are slow.

    Attributes:
        limit: most bytes that it takes from the system; None for no limit.
        held_bytes: taken from the system so far.
        allocations: how often it took some.
        is_pinned: whether what it has is pinned.
    """

    def __init__(
        self, limit: int | None = None, allocate: Callable[[int], Tensor] = allocate_pinned, *, is_pinned: bool = True
    ) -> None:
        self.limit = limit
        self.held_bytes = self.allocations = 0
        self.is_pinned = is_pinned
        self._allocate = allocate
        self._slabs: list[tuple[Tensor, Extents]] = []
        # Of pieces given back: for each slab by offset the length, and the mark of a copy that may still use it. They
        # never overlap: who is lent a piece takes the marks of all that it overlaps.
        self._busy: list[dict[int, tuple[int, Any]]] = []
        # Given back from wherever a graph dies: in any thread, also in the midst of `take`. So it is only noted there.
        self._returned: deque[tuple[int, int, int, Any]] = deque()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Lent at this moment."""
        with self._lock:
            self._sort_returned()
            return sum(extents.used_bytes for _, extents in self._slabs)

    def take(self, size: int) -> Buffer | None:
        """A piece of `size` bytes; None if the limit is reached."""
        with self._lock:
            self._sort_returned()
            for number, (_, extents) in enumerate(self._slabs):
                offset = extents.take(size)
                if offset is not None:
                    return self._lend(number, offset, size)
            if not self._add_slab(size):
                return None
            offset = self._slabs[-1][1].take(size)
            assert offset is not None
            return self._lend(len(self._slabs) - 1, offset, size)

    def reserve(self, size: int) -> None:
        """Take from the system now what will be needed to lend `size` bytes in all, as far as the limit lets."""
        with self._lock:
            while self.held_bytes < size and self._add_slab(1, hint=size - self.held_bytes):
                pass

    def give_back(self, buffer: Buffer, busy: Any = None) -> None:
        """Let others have a piece, once the copy that `busy` marks is done. Takes no lock."""
        self._returned.append((buffer.slab, buffer.offset, buffer.bytes.numel(), busy))

    def trim(self) -> None:
        """Give the system back every slab of which nothing is lent, if none is lent at all."""
        with self._lock:
            self._sort_returned()
            if not any(extents.used_bytes for _, extents in self._slabs):
                self._slabs.clear()
                self._busy.clear()
                self.held_bytes = 0

    def _lend(self, number: int, offset: int, size: int) -> Buffer:
        data = self._slabs[number][0].narrow(0, offset, size)
        marks = self._busy[number]
        found = marks.get(offset)
        if found is not None and found[0] == size:  # nearly always: the same sizes come again in each step
            del marks[offset]
            return Buffer(self, data, number, offset, () if found[1] is None else (found[1],))
        over = [at for at, (length, _) in marks.items() if at < offset + size and offset < at + length]
        left = [mark for mark in (marks.pop(at)[1] for at in over) if mark is not None]
        return Buffer(self, data, number, offset, left)

    def _sort_returned(self) -> None:
        while self._returned:
            number, offset, size, busy = self._returned.popleft()
            self._slabs[number][1].give_back(offset, size)
            self._busy[number][offset] = (size, busy)

    def _add_slab(self, size: int, hint: int = 0) -> bool:
        """Take one more slab that holds `size`; says whether the limit let it."""
        needed = -(-size // ALIGNMENT) * ALIGNMENT
        wish = max(hint, needed, min(self.held_bytes, _LARGEST_SLAB), _SMALLEST_SLAB)
        slab = 1 << (wish - 1).bit_length()
        if slab > _LARGEST_SLAB and needed <= _LARGEST_SLAB:
            slab = _LARGEST_SLAB
        if self.limit is not None and self.held_bytes + slab > self.limit:
            slab = max((self.limit - self.held_bytes) // ALIGNMENT * ALIGNMENT, 0)
            if slab < needed:
                return False
        data = self._ask_system(slab)
        self._slabs.append((data, Extents(size=slab, alignment=ALIGNMENT)))
        self._busy.append({})
        self.held_bytes += slab
        self.allocations += 1
        return True

    def _ask_system(self, size: int) -> Tensor:
        if self.is_pinned:
            try:
                return self._allocate(size)
            except RuntimeError as error:
                self.is_pinned = False
                message = (
                    f"the system would not pin {format_bytes(size)} of host memory ({_first_line(error)}). Offloading "
                    "goes on with pageable memory: copies are several times slower and hold up the step.\n"
                    "Raise the limit on locked memory (`ulimit -l`), or pass a smaller `limit`."
                )
                warnings.warn(message, UserWarning, stacklevel=2)
        return allocate_pageable(size)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
