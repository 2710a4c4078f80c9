"""Jobs: a value on its way to a tier that is slower than host memory, or back from it. Workers do them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from recollect._offload.pinned import Buffer
from recollect._offload.tiers import Tier


class WriteJob:
    """A value on its way to a slower tier, or there.

    Attributes:
        failure: why it could not be written, if it could not; it is then still where it was.
        is_claimed: somebody reads the buffer that it is written from, which is theirs to give back.
        future: done when it is written, or has failed.
    """

    __slots__ = ("_has_left", "_is_orphan", "_key", "_lock", "_tier", "failure", "future", "is_claimed")

    def __init__(self, tier: Tier) -> None:
        self._tier, self._key, self._is_orphan = tier, None, False
        self._has_left = self.is_claimed = False
        self._lock = threading.Lock()
        self.failure = ""  # text only: an exception would hold the bytes by its traceback
        self.future: Future[None]

    def arrive(self, key: Any) -> None:
        """It is written; or nobody wants it any more."""
        with self._lock:
            self._key = key
            if not self._is_orphan:
                return
        self._tier.free(key)

    def claim(self) -> bool:
        """Keep the buffer that it is written from; says whether it was still there."""
        with self._lock:
            self.is_claimed = self.is_claimed or not self._has_left
            return self.is_claimed

    def leave(self) -> bool:
        """It needs its buffer no longer; says whether it is the writer's to give back."""
        with self._lock:
            self._has_left = True
            return not self.is_claimed

    def forget(self) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._is_orphan = True
            key = self._key
        if key is not None:
            self._tier.free(key)

    def read(self, into: Tensor) -> None:
        """Get the bytes, once they are written."""
        self.future.result()
        self._tier.read(self._key, into)


class ReadJob:
    """A value on its way back from a slower tier into host memory."""

    __slots__ = ("buffer", "bytes", "future")

    def __init__(self, data: Tensor, buffer: Buffer | None) -> None:
        self.bytes, self.buffer = data, buffer
        self.future: Future[None]
