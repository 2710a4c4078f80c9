"""What is there at each call whatever a plan does: all that lives through the step, gradients, what is being read.

Regions change when values of forward come and go. They do not change the order of backward, nor what it makes: a
gradient is there from the call that makes it to the last that reads it. What a node of the graph has asked for it holds
until it is done.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence

from recollect._plan.problem import Problem, Run


class Presence:
    """What is there in any case at the calls from the end of forward on.

    Args:
        problem: the step.
        run: all of its forward.
    """

    def __init__(self, problem: Problem, run: Run) -> None:
        self._problem, self._turn, self._stop = problem, problem.forward_count, len(problem.calls)
        self._there: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for storage, (start, end) in enumerate(problem.spans):
            if problem.sizes[storage] and self._must_stay(storage, run):
                self._note(storage, start, self._stop if end is None else end)
        for number in range(self._turn, self._stop):
            for storage in (*problem.reads[number], *(value.storage for value in problem.calls[number].outputs)):
                self._note(storage, number, number + 1)
        asked, backwards = problem.backwards.asked, problem.backwards
        for storage, savers in problem.saved_by.items():
            end = problem.spans[storage][1]
            for saver, moment in ((one, moment) for one in savers for moment in asked.get(one, ())):
                done = backwards.released_in(saver, backwards.pass_of(moment))
                self._note(storage, moment, done if end is None else min(done, end))

    def _must_stay(self, storage: int, run: Run) -> bool:
        """Whether regions cannot end its life: it is none of forward's values, or others hold it longer than nodes."""
        problem, (start, end) = self._problem, self._problem.spans[storage]
        if problem.is_lasting(storage) or start >= self._turn or end is None:
            return True
        released = (problem.released.get(by, end) for by in problem.saved_by.get(storage, ()))
        return end > max([run.end, *released])

    def _note(self, storage: int, start: int, stop: int) -> None:
        start = max(start, self._turn)
        if start < stop and self._problem.sizes[storage]:
            self._there[storage].append((start, stop))

    def list_there(self, moment: int) -> frozenset[int]:
        """The storages that are there while a call runs."""
        return frozenset(
            storage for storage, spans in self._there.items() if any(first <= moment < stop for first, stop in spans)
        )

    @functools.cached_property
    def bytes_at(self) -> list[int]:
        """For each call from the end of forward on, how many bytes that is, its workspace included."""
        return self._add_up({})

    def add_needed(self, lasts: dict[int, int]) -> list[int]:
        """The same, and what later calls need, if nothing of that is forgotten.

        Args:
            lasts: for storages of forward the last call of backward that asks for them.
        """
        return self._add_up({storage: (self._turn, last) for storage, last in lasts.items()})

    def _add_up(self, more: dict[int, tuple[int, int]]) -> list[int]:
        changes = [0] * (self._stop - self._turn + 1)
        for storage in self._there.keys() | more.keys():
            own = [*self._there.get(storage, ()), *([more[storage]] if storage in more else ())]
            for first, stop in _merge(own):
                changes[first - self._turn] += self._problem.sizes[storage]
                changes[min(stop, self._stop) - self._turn] -= self._problem.sizes[storage]
        fixed = self._problem.profile.fixed_bytes
        workspaces = (call.workspace_bytes for call in self._problem.calls[self._turn :])
        sums = itertools.accumulate(changes[:-1])
        return [fixed + own + workspace for own, workspace in zip(sums, workspaces, strict=True)]


def _merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that do not overlap and cover the same.

    >>> _merge([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    found: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif first < stop:
            found.append((first, stop))
    return found
