"""How long the memory of a step lives, and how much of it there is at each call. Plain data; no torch here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from recollect._core.calls import Category, Lifetime, Made, OpCall, Phase, Storage

Span = tuple[int, int | None]
"""The call that a storage came with, -1 if it was there before; and the call at whose start it was gone, if it was."""

_THERE_BEFORE = (Lifetime.STEP, Lifetime.GIVEN)


class Timeline:
    """The lives of a profile's storages, and the bytes in use at each call.

    A storage is there from the call that makes it, that call included, to the call at whose start it is gone. Where
    nobody saw when it went, it goes as its `Lifetime` says.

    Attributes:
        sizes: of each storage, rounded as the device does; 0 for what is on another device.
        spans: for each storage its first call and the first call at which it is gone; a first call of -1 is before the
            step, an end of None after it.
        bytes_at: bytes in use while each call runs: what it reads, makes and takes as workspace included.
        held_bytes: in use before the first call.
    """

    __slots__ = ("_calls", "_fixed_bytes", "_storages", "bytes_at", "held_bytes", "sizes", "spans")

    def __init__(
        self, storages: Sequence[Storage], calls: Sequence[OpCall], *, rounding_bytes: int = 1, fixed_bytes: int = 0
    ) -> None:
        self._storages, self._calls, self._fixed_bytes = storages, calls, fixed_bytes
        self.sizes: list[int] = [
            0 if storage.device else -(-storage.bytes // rounding_bytes) * rounding_bytes for storage in storages
        ]
        self.spans: list[Span] = _find_spans(storages, calls)
        changes = [0] * (len(calls) + 3)  # what backward is given may come and go after the last call
        for size, (start, end) in zip(self.sizes, self.spans, strict=True):
            changes[start + 1] += size
            if end is not None:
                changes[max(end, start) + 1] -= size
        before, *running = itertools.accumulate(changes, initial=fixed_bytes)
        assert before == fixed_bytes
        self.held_bytes = running[0]
        self.bytes_at: list[int] = [now + call.workspace_bytes for now, call in zip(running[1:], calls, strict=False)]

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at a time."""
        return max(self.bytes_at, default=self.held_bytes)

    @property
    def peak_call(self) -> int:
        """The first call at which that many are; -1 in a profile without calls."""
        return self.bytes_at.index(self.peak_bytes) if self.bytes_at else -1

    def alive_at(self, call: int) -> list[int]:
        """The storages that are there while a call runs; those there before the step for -1."""
        return [
            index
            for index, (start, end) in enumerate(self.spans)
            if start <= call and (end is None or end > call) and self.sizes[index]
        ]

    def bytes_by_category(self, call: int) -> dict[Category, int]:
        """What is there while a call runs by what it is for, largest first; workspace is among the temporaries."""
        found: Counter[Category] = Counter()
        for index in self.alive_at(call):
            found[self._storages[index].category] += self.sizes[index]
        if call >= 0:
            found[Category.TEMPORARY] += self._calls[call].workspace_bytes
        found[Category.LIBRARY] += self._fixed_bytes
        return {category: size for category, size in found.most_common() if size}


def find_made(storages: Sequence[Storage], calls: Sequence[OpCall]) -> Iterator[Made]:
    """Each storage that a call makes, with the first call and output on it, in order."""
    there = {index for index, storage in enumerate(storages) if storage.lifetime in _THERE_BEFORE}
    for number, call in enumerate(calls):
        for output, value in enumerate(call.outputs):
            if value.storage not in there:
                there.add(value.storage)
                yield Made(storage=value.storage, call=number, output=output)


def count_forward(calls: Sequence[OpCall]) -> int:
    """How many calls are of forward, up to the first that is not."""
    return next((at for at, call in enumerate(calls) if call.phase is not Phase.FORWARD), len(calls))


def _find_spans(storages: Sequence[Storage], calls: Sequence[OpCall]) -> list[Span]:
    made = {one.storage: one.call for one in find_made(storages, calls)}
    last: dict[int, int] = {}
    for number, call in enumerate(calls):
        last.update(dict.fromkeys((*call.reads, *(value.storage for value in call.outputs)), number))
    first_backward = count_forward(calls)
    spans: list[Span] = []
    for index, storage in enumerate(storages):
        said = first_backward if storage.lifetime is Lifetime.GIVEN else made.get(index, -1)
        start = said if storage.made_at is None else storage.made_at
        end = storage.freed_at
        if end is None and storage.lifetime in (Lifetime.VALUE, Lifetime.GIVEN) and storage.made_at is None:
            end = last.get(index, start) + 1
        spans.append((start, end))
    return spans
