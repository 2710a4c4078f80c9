"""Pieces of one long stretch of bytes, taken and given back: of a slab of memory, or of a file.

In a training step the same sizes come again and again, so a piece that is given back waits in a bin of its size and is
taken from there without a search. Only when no bin fits are all free pieces joined and searched.
"""

from __future__ import annotations


class Extents:
    """Which parts of ``[0, size)`` are free. Not thread-safe: its owner locks.

    Attributes:
        size: of the whole stretch.
        used_bytes: taken at this moment, rounding included.

    >>> extents = Extents(size=4096, alignment=1024)
    >>> extents.take(1000), extents.take(1025), extents.take(2000)
    (0, 1024, None)
    >>> extents.give_back(0, 1000)
    >>> extents.take(2000), extents.take(10)
    (None, 0)
    >>> extents.used_bytes
    3072
    """

    __slots__ = ("_alignment", "_bins", "_free", "size", "used_bytes")

    def __init__(self, *, size: int, alignment: int) -> None:
        self.size, self.used_bytes = size, 0
        self._alignment = alignment
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # offset and length, by offset
        self._bins: dict[int, list[int]] = {}

    def round_up(self, size: int) -> int:
        """What a piece of that many bytes takes."""
        return -(-max(size, 1) // self._alignment) * self._alignment

    def take(self, size: int) -> int | None:
        """The offset of a free piece; None if there is none so large."""
        length = self.round_up(size)
        offset: int | None
        if waiting := self._bins.get(length):
            offset = waiting.pop()
        else:
            offset = self._carve(length)
            if offset is None and self._join():
                offset = self._carve(length)
        if offset is not None:
            self.used_bytes += length
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Free a piece that `take` gave, by its offset and the size asked for."""
        length = self.round_up(size)
        self.used_bytes -= length
        self._bins.setdefault(length, []).append(offset)

    def grow(self, size: int) -> None:
        """Make the stretch longer, to `size`."""
        if size > self.size:
            self._free.append((self.size, size - self.size))
            self.size = size
            self._join()

    def _carve(self, length: int) -> int | None:
        """Cut a piece off the smallest free one that holds it."""
        best = min((piece for piece in self._free if piece[1] >= length), key=lambda piece: piece[1], default=None)
        if best is None:
            return None
        offset, room = best
        index = self._free.index(best)
        self._free[index : index + 1] = [(offset + length, room - length)] if room > length else []
        return offset

    def _join(self) -> bool:
        """Put neighbours together; says whether anything changed."""
        pieces = self._free + [(offset, length) for length, bin_ in self._bins.items() for offset in bin_]
        joined: list[tuple[int, int]] = []
        for offset, length in sorted(pieces):
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._bins.clear()
        changed, self._free = joined != self._free, joined
        return changed
