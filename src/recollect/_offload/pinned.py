"""A pool of pinned host memory: taken from the system in few large slabs, lent in pieces, never given back in between.

Pinning costs half a second per GiB, so a step must find what it needs already pinned: after the first steps nothing is
taken from the system any more. Slabs are powers of two, because torch rounds pinned memory up to that.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from recollect._core.units import format_bytes
from recollect._offload.extents import Extents
from recollect._offload.host_memory import ALIGNMENT, aligned_bytes, allocate_pinned, round_up
from recollect._offload.kinds import Kind

_SMALLEST_SLAB = 2**20
_LARGEST_SLAB = 2**29


class Buffer:
    """A piece of a slab; who is done with it gives it back.

    Attributes:
        bytes: the piece as a flat tensor of bytes; `size` says how many.
        busy: marks of copies that may still read or write it; the next user waits for them.
        shelf: where pieces of its size wait for the next user.
        slab: the number of its slab in the pool; `offset` says where it lies in that.
        shaped: the piece as a tensor of a dense `kind`, the last that it was used for.
    """

    __slots__ = ("busy", "bytes", "kind", "offset", "shaped", "shelf", "size", "slab")

    def __init__(self, shelf: list[Buffer], data: Tensor, slab: int, offset: int, busy: Sequence[Any]) -> None:
        self.shelf, self.bytes, self.slab, self.offset, self.busy = shelf, data, slab, offset, busy
        self.size = data.numel()
        self.kind: Kind | None = None
        self.shaped = data

    def shape_as(self, kind: Kind) -> Tensor:
        """The piece as a tensor of a dense kind."""
        self.kind, self.shaped = kind, kind.over(self.bytes)
        return self.shaped

    def give_back(self, busy: Any = None) -> None:
        """Let others have it, once the copy that `busy` marks is done.

        Called from wherever a graph dies: in any thread, also in the midst of the pool's own work. So it takes no lock.
        """
        self.busy = () if busy is None else (busy,)
        self.shelf.append(self)


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
        # Pieces that were given back wait on shelves by their size: in a training step the same sizes come again and
        # again. Any thread may put a piece there or take one at any time, so a shelf lives as long as the pool.
        self._shelves: dict[int, list[Buffer]] = {}
        # Of pieces that were cut anew since: for each slab by offset their length, and the mark of a copy that may
        # still use them. They never overlap: who is lent a piece takes the marks of all that it overlaps.
        self._busy: list[dict[int, tuple[int, Sequence[Any]]]] = []
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Lent at this moment, rounding included."""
        with self._lock:
            waiting = sum(len(shelf) * round_up(size) for size, shelf in self._shelves.items())
            return sum(extents.used_bytes for _, extents in self._slabs) - waiting

    def take(self, size: int) -> Buffer | None:
        """A piece of `size` bytes; None if the limit is reached."""
        shelf = self._shelves.get(size)
        if shelf:
            try:
                return shelf.pop()
            except IndexError:  # another thread had it
                pass
        with self._lock:
            found = self._cut(size)
            if found is None and self._put_together():
                found = self._cut(size)
            if found is None and self._add_slab(size):
                found = self._cut(size)
            return found

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take from the system now what it will need to lend pieces of these sizes at a time, as far as it may."""
        taken = [self.take(size) for size in sizes]
        for buffer in taken:
            if buffer is not None:
                buffer.give_back()

    def trim(self) -> None:
        """Give the system back all slabs, if nothing is lent."""
        with self._lock:
            self._put_together()
            if not any(extents.used_bytes for _, extents in self._slabs):
                self._slabs.clear()
                self._busy.clear()
                self.held_bytes = 0

    def _cut(self, size: int) -> Buffer | None:
        """A piece off a slab that has room."""
        for number, (slab, extents) in enumerate(self._slabs):
            offset = extents.take(size)
            if offset is not None:
                marks = self._busy[number]
                over = [at for at, (length, _) in marks.items() if at < offset + size and offset < at + length]
                left = [mark for at in over for mark in marks.pop(at)[1]]
                shelf = self._shelves.setdefault(size, [])
                return Buffer(shelf, slab.narrow(0, offset, size), number, offset, left)
        return None

    def _put_together(self) -> bool:
        """Give the pieces that wait back to their slabs, so that others can be cut; says whether there were any."""
        found = False
        for shelf in list(self._shelves.values()):
            while shelf:
                try:
                    buffer = shelf.pop()
                except IndexError:  # another thread had it
                    break
                self._slabs[buffer.slab][1].give_back(buffer.offset, buffer.size)
                self._busy[buffer.slab][buffer.offset] = (buffer.size, buffer.busy)
                found = True
        return found

    def _add_slab(self, size: int) -> bool:
        """Take one more slab that holds `size`; says whether the limit let it."""
        needed = round_up(size)
        wish = max(needed, min(self.held_bytes, _LARGEST_SLAB), _SMALLEST_SLAB)
        slab = 1 << (wish - 1).bit_length()
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
                    f"the system refused to pin {format_bytes(size)} of host memory ({_first_line(error)}). Offloading "
                    "continues with pageable memory: copies are several times slower, and the step waits for them.\n"
                    "Raise the limit on locked memory (`ulimit -l`), or pass a smaller `limit`."
                )
                warnings.warn(message, UserWarning, stacklevel=2)
        return aligned_bytes(size)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
