"""A tier of one's own, as users may write it."""

import itertools

from torch import Tensor


class Shelf:
    """A tier in a dictionary."""

    name = "shelf"

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self._keys = itertools.count()  # several threads ask at a time

    def write(self, data: Tensor) -> int:
        key = next(self._keys)
        self.values[key] = data.clone()
        return key

    def read(self, key: int, into: Tensor) -> None:
        into.copy_(self.values[key])

    def free(self, key: int) -> None:
        del self.values[key]

    def close(self) -> None:
        self.values.clear()
