"""What users register for the whole process, and how they take it back."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Registered items in order; read as the tuple `items`, which is replaced as a whole, never changed."""

    __slots__ = ("_count", "_entries", "_lock", "items")

    def __init__(self) -> None:
        self.items: tuple[T, ...] = ()
        self._entries: dict[int, T] = {}
        self._count = 0
        self._lock = threading.Lock()

    def add(self, item: T) -> Registration:
        """Register an item until the registration is removed; twice is two registrations."""
        with self._lock:
            self._count += 1
            key = self._count
            self._entries[key] = item
            self.items = tuple(self._entries.values())
        return Registration(self, key)

    def drop(self, key: int) -> None:
        """Take one registration back."""
        with self._lock:
            self._entries.pop(key, None)
            self.items = tuple(self._entries.values())


class Registration:
    """Returned by the `register_...` functions: `remove` takes the registration back, as does the end of a ``with``."""

    def __init__(self, registry: Registry[Any], key: int) -> None:
        self._registry, self._key = registry, key

    def remove(self) -> None:
        """Take the registration back; doing it twice is harmless."""
        self._registry.drop(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
