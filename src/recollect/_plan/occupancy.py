"""Bytes in use at each step of a rehearsal, from when storages come and go; worked on as arrays, for there are many.

A step of the plain profile is a call. A rehearsal puts calls that run again between them, which moves the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


class Order:
    """The calls of a step in the order in which they run, those that run again before the calls that ask for them.

    Args:
        count: the calls of the plain step.
        inserted: by call, what runs again just before it, each with who runs it.

    Attributes:
        at: for each call of the plain step, where it runs now.
        before: for each call the first place of what runs for it; one more, for the end.
        calls: what runs at each place.
        owners: of places at which something runs again: who runs it.
    """

    def __init__(self, count: int, inserted: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        import numpy as np

        more = np.zeros(count + 1, dtype=np.int64)
        for moment, again in inserted.items():
            more[moment] = len(again)
        ends = np.arange(count + 1) + np.cumsum(more)
        places = ends - more
        self.array_at, self.array_before = ends[:count], places
        self.array_calls = np.empty(int(ends[-1]), dtype=np.int64)
        self.array_calls[self.array_at] = np.arange(count)
        self.owners: dict[int, int] = {}
        for moment in sorted(inserted):
            first = int(places[moment])
            again = inserted[moment]
            self.array_calls[first : first + len(again)] = [call for call, _ in again]
            self.owners.update(zip(range(first, first + len(again)), (index for _, index in again), strict=True))
        self.at: list[int] = self.array_at.tolist()
        self.before: list[int] = self.array_before.tolist()
        self.calls: list[int] = self.array_calls.tolist()


class Occupancy:
    """What the storages of a profile take, step by step.

    Args:
        sizes: of its storages.
        spans: from which call to before which each is there; see `Timeline`.
        workspaces: what each call takes while it runs.
        fixed_bytes: what is always there.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        spans: Sequence[tuple[int, int | None]],
        workspaces: Sequence[int],
        fixed_bytes: int,
    ) -> None:
        import numpy as np

        # What takes nothing, and what is made after the last call, is in use at none.
        kept = [at for at, size in enumerate(sizes) if size and spans[at][0] < len(workspaces)]
        self._numbers = {at: number for number, at in enumerate(kept)}
        self._sizes = np.array([sizes[at] for at in kept], dtype=np.int64)
        self._starts = np.array([spans[at][0] for at in kept], dtype=np.int64)
        last = len(workspaces)  # what stays, stays to the end
        ends = ((start, last if end is None else end) for start, end in (spans[at] for at in kept))
        self._ends = np.array([max(start, end) for start, end in ends], dtype=np.int64)
        self._is_first = self._starts < 0
        self._workspaces = np.array(workspaces, dtype=np.int64)
        self._held_bytes = fixed_bytes + int(self._sizes[self._is_first].sum())

    def follow(self, order: Order, ends: Mapping[int, int], copies: Iterable[tuple[int, int, int]]) -> Numbers:
        """Bytes in use while each step runs.

        Args:
            order: the steps.
            ends: the steps at which storages are gone, where that is not as in the plain step.
            copies: of storages that are made again: from which step, to before which, and how many bytes.
        """
        import numpy as np

        count = len(order.calls)
        stops = order.array_before[self._ends]
        changed = [(self._numbers[at], stop) for at, stop in ends.items() if at in self._numbers]
        if changed:
            numbers, moved = zip(*changed, strict=True)
            stops[list(numbers)] = moved
        starts = np.where(self._is_first, 0, order.array_at[self._starts])
        is_there = self._is_first | (starts < stops)
        changes = np.zeros(count + 1, dtype=np.int64)
        comes = is_there & ~self._is_first
        np.add.at(changes, starts[comes], self._sizes[comes])
        np.subtract.at(changes, stops[is_there], self._sizes[is_there])
        again = np.array(list(copies), dtype=np.int64).reshape(-1, 3)
        np.add.at(changes, again[:, 0], again[:, 2])
        np.subtract.at(changes, again[:, 1], again[:, 2])
        levels: Numbers = self._held_bytes + np.cumsum(changes[:count]) + self._workspaces[order.array_calls]
        return levels
