"""A log of storages: which a step touches, when each came, when it went, and how large it was meanwhile."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from recollect._profile.storages import Found, storages_of

BEFORE = -1
"""The call number of what was there before the first call."""


class StorageLife:
    """A storage between two changes of its size.

    Attributes:
        nbytes: its size.
        device: where it is.
        made_at: the call that it came with, `BEFORE` if it was there.
        is_given: whether no operator made it: it was there, or came in another way and was met as an argument.
        freed_at: the call at whose start it was gone; None while it is there.
        in_variable_until: the call before which the last code returned that still had it in a variable; None if none.
    """

    __slots__ = ("device", "freed_at", "in_variable_until", "is_given", "made_at", "nbytes")

    def __init__(self, nbytes: int, device: torch.device, made_at: int, *, is_given: bool) -> None:
        self.nbytes, self.device, self.made_at, self.is_given = nbytes, device, made_at, is_given
        self.freed_at: int | None = None
        self.in_variable_until: int | None = None


class _Tracked(weakref.ref[torch.UntypedStorage]):
    """A live storage. Its Python object lives as long as its bytes, so that its identity is a key until it dies."""

    __slots__ = ("key", "number")

    key: int
    number: int


class StorageLog:
    """Numbers storages in the order in which they are met. Holds none of them alive.

    Death only appends to a queue, because it may come at any place in this class; `settle` reads the queue.

    Attributes:
        entries: by number.
    """

    def __init__(self) -> None:
        self.entries: list[StorageLife] = []
        self._tracked: dict[int, _Tracked] = {}
        self._freed: deque[_Tracked] = deque()
        self._resized: dict[int, _Tracked] = {}

    def settle(self, call: int) -> None:
        """Note what has gone, or was resized past the operators, before this call was done."""
        freed = self._freed
        while freed:
            tracked = freed.popleft()
            self.entries[tracked.number].freed_at = call
            del self._tracked[tracked.key]
            self._resized.pop(tracked.key, None)
        for tracked in tuple(self._resized.values()):
            storage = tracked()
            if storage is not None:
                self._measure(tracked, storage, call)

    def number(
        self, storage: torch.UntypedStorage, device: torch.device, made_at: int, *, is_given: bool = False
    ) -> int:
        """The number of a storage; one that is met for the first time came with `made_at`.

        Call `settle` before: until then a new storage may have the key of a dead one.
        """
        tracked = self._tracked.get(id(storage))
        if tracked is not None:
            self._measure(tracked, storage, made_at)
            return tracked.number
        tracked = _Tracked(storage, self._freed.append)
        tracked.key, tracked.number = id(storage), len(self.entries)
        self._tracked[tracked.key] = tracked
        self.entries.append(StorageLife(storage.nbytes(), device, made_at, is_given=is_given))
        return tracked.number

    def _measure(self, tracked: _Tracked, storage: torch.UntypedStorage, call: int) -> None:
        """One that has another size now is another entry."""
        entry = self.entries[tracked.number]
        nbytes = storage.nbytes()
        if nbytes == entry.nbytes:
            return
        at = max(call, entry.made_at, 0)  # met again by one who only knows that it was there before
        entry.freed_at = at
        tracked.number = len(self.entries)
        self.entries.append(StorageLife(nbytes, entry.device, at, is_given=entry.is_given))
        self._resized[tracked.key] = tracked

    def list_live(self, device: torch.device) -> Iterator[torch.UntypedStorage]:
        """What was met and is still there, if it really has memory on a device: fakes have none."""
        for tracked in tuple(self._tracked.values()):
            storage = tracked()
            if storage is not None and storage.device == device:
                yield storage

    def find_same(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage that was met, if it has the size that it had; call `settle` before."""
        tracked = self._tracked.get(id(storage))
        if tracked is None or self.entries[tracked.number].nbytes != storage.nbytes():
            return None
        return tracked.number

    def note_variable(self, tensor: Tensor, call: int) -> None:
        """Code that returns before this call still has a tensor in a variable; call `settle` before."""
        for storage, _ in storages_of(tensor):
            number = self.find_same(storage)
            if number is not None:
                self.entries[number].in_variable_until = call

    def include(self, tensor: Tensor) -> list[int]:
        """The numbers of what a tensor is made of, which was there before the step."""
        return [self.number(storage, device, BEFORE, is_given=True) for storage, device in storages_of(tensor)]

    def count_from_start(self, tensor: Tensor) -> list[int]:
        """The numbers of what a tensor is made of, which counts as there before the step, though the step made it."""
        found = [self.find_same(storage) for storage, _ in storages_of(tensor)]
        numbers = [number for number in found if number is not None]
        for number in numbers:
            self.entries[number].made_at, self.entries[number].is_given = BEFORE, True
        return numbers

    def alias(self, storage: torch.UntypedStorage, number: int) -> None:
        """Let a storage stand for another one; whoever calls keeps it alive as long as the log is written."""
        tracked = _Tracked(storage)
        tracked.key, tracked.number = id(storage), number
        self._tracked[tracked.key] = tracked

    def was_there(self, found: Found) -> bool:
        """Whether a storage was made by no operator of the step; call `settle` before."""
        tracked = self._tracked.get(id(found[0]))
        return tracked is None or self.entries[tracked.number].is_given
