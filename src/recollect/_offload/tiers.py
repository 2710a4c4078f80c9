"""Tiers: where bytes live while they are away. One small protocol; host memory is the first of them."""

from __future__ import annotations

import threading
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from recollect._core.errors import TierFullError
from recollect._offload.host_memory import aligned_bytes
from recollect._offload.pinned import Buffer, PinnedPool


@runtime_checkable
class Tier(Protocol):
    """A place where offloaded bytes wait. Write your own, and pass it as ``recollect.offload(tier=...)``.

    Several worker threads call it at the same time. Its exceptions reach the user as `recollect.OffloadError`, with the
    names of the tensor and the tier; only `recollect.TierFullError` means that the value stays where it is.

    Attributes:
        name: for errors and reports.

    >>> import itertools, torch, recollect
    >>> class Ram:
    ...     name = "a dict"
    ...     def __init__(self):
    ...         self.kept, self.keys = {}, itertools.count()
    ...     def write(self, data):
    ...         key = next(self.keys)
    ...         self.kept[key] = data.clone()
    ...         return key
    ...     def read(self, key, into):
    ...         into.copy_(self.kept[key])
    ...     def free(self, key):
    ...         del self.kept[key]
    ...     def close(self):
    ...         self.kept.clear()
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh()), torch.ones(256, 8)
    >>> with recollect.offload(tier=Ram(), min_bytes="1KiB") as away:
    ...     loss = model(x).sum()
    >>> loss.backward()
    >>> away.report().tier
    'a dict'
    """

    name: str

    def write(self, data: Tensor) -> Any:
        """Store a flat host tensor of bytes, and return a key for it. The tensor may be reused after the call."""

    def read(self, key: Any, into: Tensor) -> None:
        """Fill a flat host tensor with the bytes behind a key."""

    def free(self, key: Any) -> None:
        """Delete the bytes behind a key. Must not block: it is called where graphs are freed."""

    def close(self) -> None:
        """Release everything. Calling it again does nothing."""


class HostTier:
    """Pinned host memory, in a pool with a limit.

    Copies between it and a device go directly into its buffers (`pool`); `write` and `read` are for those who come with
    bytes in host memory.

    Attributes:
        name: ``"host"``.
        pool: its memory.

    >>> tier = HostTier(limit=2**20)
    >>> key = tier.write(torch.arange(4, dtype=torch.uint8))
    >>> back = torch.zeros(4, dtype=torch.uint8)
    >>> tier.read(key, back)
    >>> tier.free(key)
    >>> back.tolist(), tier.pool.used_bytes
    ([0, 1, 2, 3], 0)
    """

    def __init__(self, limit: int | None = None) -> None:
        self.name = "host"
        self.pool = PinnedPool(limit) if torch.accelerator.is_available() else pageable_pool(limit)

    def write(self, data: Tensor) -> Buffer:
        """Copy bytes into a buffer.

        Raises:
            TierFullError: the limit is reached.
        """
        buffer = self.pool.take(data.numel())
        if buffer is None:
            raise TierFullError
        for mark in buffer.busy:
            mark.synchronize()
        buffer.bytes.copy_(data)
        return buffer

    def read(self, key: Buffer, into: Tensor) -> None:
        """Copy bytes out of a buffer."""
        into.copy_(key.bytes)

    def free(self, key: Buffer) -> None:
        """Give a buffer back."""
        key.give_back()

    def close(self) -> None:
        """Give the memory back to the system, if nobody uses it."""
        self.pool.trim()


def pageable_pool(limit: int | None) -> PinnedPool:
    """A pool for machines without an accelerator, where nothing is gained by pinning."""
    return PinnedPool(limit, aligned_bytes, is_pinned=False)


class SharedHosts:
    """The host tiers of a process: whoever asks with the same limit shares one, and its limit."""

    def __init__(self) -> None:
        self._tiers: dict[int | None, HostTier] = {}
        self._lock = threading.Lock()

    def get(self, limit: int | None) -> HostTier:
        """The tier with this limit."""
        with self._lock:
            tier = self._tiers.get(limit)
            if tier is None:
                tier = self._tiers[limit] = HostTier(limit)
            return tier


shared_hosts = SharedHosts()
"""Pinned memory outlives each use of it, because pinning costs half a second per GiB. Bounded by the limits in use."""
