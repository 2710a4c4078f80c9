"""What users register for the whole process, and how they take it back."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Registered items in order; read as the tuple `items`, which is replaced as a whole, never changed."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: tuple[T, ...] = ()

    def add(self, item: T) -> Registration:
        """Register an item until the registration is removed."""
        self.items = (*self.items, item)
        return Registration(self, item)

    def drop(self, item: object) -> None:
        """Take an item out; none of its equals."""
        self.items = tuple(other for other in self.items if other is not item)


class Registration:
    """Returned by the `register_...` functions: `remove` takes the registration back, as does the end of a ``with``."""

    def __init__(self, registry: Registry[T], item: T) -> None:
        self._registry, self._item = registry, item

    def remove(self) -> None:
        """Take the registration back; doing it twice is harmless."""
        self._registry.drop(self._item)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
