"""What processes that train together agree on: plans, by the first of those with the same model; figures, by the worst.

Every process runs the same steps at the same time, because steps wait for each other. So whatever decides what runs
next is decided once and told to all, and every process asks the same questions in the same order. Processes whose
models have the same modules have one plan, made by the first of them; stages of a pipeline have their own. Without a
process group, or alone in it, nothing is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed, nn

from recollect._apply.targets import find_targets
from recollect._core.errors import RecollectError

T = TypeVar("T")


class Ranks:
    """The processes that train together, as one of them sees it.

    Args:
        model: what this one trains.

    Attributes:
        is_leader: whether this one makes the plan for those with the same model.
        are_alone: whether there are no others.
        are_alike: whether all have the same model.
    """

    def __init__(self, model: nn.Module) -> None:
        is_up = distributed.is_available() and distributed.is_initialized()
        self._size = distributed.get_world_size() if is_up else 1
        self._rank = distributed.get_rank() if is_up else 0
        models = self._gather(_describe(model)) if self._size > 1 else [""]
        self._alike = [rank for rank, one in enumerate(models) if one == models[self._rank]]
        self.is_leader = self._alike[0] == self._rank
        self.are_alone, self.are_alike = self._size == 1, len(self._alike) == self._size

    def decide(self, make: Callable[[], T]) -> T:
        """What the first process with this model makes, on all of them; if one fails, all do, whatever their model.

        Raises:
            Exception: what was raised there.
        """
        if self._size == 1:
            return make()
        made = self._gather(_attempt(make) if self.is_leader else (None, None))
        mine = made[self._alike[0]]
        _raise_first([mine[1], *(error for _, error in made)])
        decided: T = mine[0]
        return decided

    def together(self, work: Callable[[], T]) -> T:
        """What each process makes for itself; if one fails, all do.

        Raises:
            Exception: what was raised here, or on the first process on which something was.
        """
        if self._size == 1:
            return work()
        result, error = _attempt(work)
        _raise_first([error, *self._gather(error)])
        return cast("T", result)

    def largest(self, value: int | None) -> int | None:
        """The largest value among the processes with this model; None if one of them has none."""
        if self._size == 1:
            return value
        values = [one for rank, one in enumerate(self._gather(value)) if rank in self._alike]
        return None if None in values else max(values)

    def all(self, is_so: bool) -> bool:  # noqa: FBT001
        """Whether it is so on all processes, whatever their model."""
        return is_so if self._size == 1 else all(self._gather(is_so))

    def check_same(self, what: str, value: str) -> None:
        """Refuse to go on if processes with this model differ.

        Raises:
            ValueError: they do.
        """
        if self._size == 1:
            return
        values = self._gather(value)
        different = [rank for rank in self._alike if values[rank] != value]
        if self.all(not different):
            return
        message = (
            f"rank {self._rank} and rank {different[0]} do not have the same {what}: {value!r} and "
            f"{values[different[0]]!r}"
            if different
            else f"other ranks do not have the same {what}"
        )
        raise ValueError(message)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._size
        distributed.all_gather_object(found, value)
        return found


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error if _can_be_sent(error) else RuntimeError(f"{type(error).__name__}: {error}")


def _raise_first(errors: list[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _can_be_sent(error: Exception) -> bool:
    return isinstance(error, (ValueError, TypeError, RuntimeError, RecollectError))


def _describe(model: nn.Module) -> str:
    """A digest of a model's modules, by path and class."""
    lines = (f"{target.name} {type(target.chain[-1]).__name__}" for target in find_targets(model))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
