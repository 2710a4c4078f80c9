"""How fast bytes move here: inside host memory, between host and device, to disk and back. Measured, not looked up.

Each measurement repeats one copy until a share of time is used up and takes the fastest, because what disturbs a copy
only slows it down. The sizes are small enough for a machine that is busy with something else: the numbers say which
tier is worth using; they are not a benchmark.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

COPY_BYTES = 64 * 2**20
DISK_BYTES = 128 * 2**20
_CHUNK_BYTES = 8 * 2**20
_SHARE_S = 0.15
_MOST_REPEATS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way that bytes take.

    Attributes:
        name: which, as ``"host to cuda:0, pinned"``.
        bytes_per_s: how many came through it in a second. A copy inside one memory counts each byte once.
    """

    name: str
    bytes_per_s: float


def measure_links(*, devices: bool = True, folder: Path | None = None) -> Iterator[Link]:
    """Measure host memory, every device, and a folder's disk, one after the other; each takes about a quarter second.

    Args:
        devices: whether to measure the accelerators, too.
        folder: on the disk to measure; None for the folder of temporary files.

    >>> [link.name for link in measure_links(devices=False)]
    ['inside host memory', 'to disk', 'from disk']
    """
    yield measure_memory()
    if devices and torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            kind = torch.accelerator.current_accelerator()
            assert kind is not None
            yield from measure_copies(torch.device(kind.type, index))
    yield from measure_disk(folder)


def measure_memory(size: int = COPY_BYTES) -> Link:
    """Copy inside host memory, with as many threads as torch uses.

    >>> measure_memory(2**20).bytes_per_s > 0
    True
    """
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return Link(name="inside host memory", bytes_per_s=_speed(size, lambda: target.copy_(source)))


def measure_copies(device: torch.device, size: int = COPY_BYTES) -> Iterator[Link]:
    """Copy between host and device in both directions, from pinned and from pageable memory, and inside the device.

    What cannot be had, as pinned memory where its amount is limited, is left out.
    """
    there = torch.empty(size, dtype=torch.uint8, device=device)
    yield from _measure_both_ways(there, pinned=True)
    yield from _measure_both_ways(there, pinned=False)
    inside = _speed(size, _finished(device, torch.empty_like(there), there))
    yield Link(name=f"inside {device}", bytes_per_s=inside)


def measure_pinned(device: torch.device, size: int = COPY_BYTES) -> Iterator[Link]:
    """Copy between pinned host memory and a device in both directions; nothing where none can be pinned."""
    yield from _measure_both_ways(torch.empty(size, dtype=torch.uint8, device=device), pinned=True)


def _measure_both_ways(there: torch.Tensor, *, pinned: bool) -> Iterator[Link]:
    device, size, kind = there.device, there.numel(), "pinned" if pinned else "pageable"
    with suppress(RuntimeError):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        up = _speed(size, _finished(device, there, here))
        yield Link(name=f"host to {device}, {kind}", bytes_per_s=up)
        down = _speed(size, _finished(device, here, there))
        yield Link(name=f"{device} to host, {kind}", bytes_per_s=down)


def measure_disk(folder: Path | None = None, size: int = DISK_BYTES) -> Iterator[Link]:
    """Write a file and read it back, past the page cache where the system allows it. The file is gone afterwards.

    Writing includes the wait until the disk has the bytes. Stops early on a slow disk.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """
    chunk = os.urandom(_CHUNK_BYTES)  # a file system that compresses must not win by it
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, start = 0, time.perf_counter()
        while written < size and (written == 0 or time.perf_counter() - start < _SHARE_S * 2):
            written += sum(file.write(chunk) for _ in range(4))
            os.fsync(file.fileno())
        yield Link(name="to disk", bytes_per_s=written / (time.perf_counter() - start))

        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into, read, start = bytearray(_CHUNK_BYTES), 0, time.perf_counter()
        while (count := file.readinto(into)) and (read == 0 or time.perf_counter() - start < _SHARE_S * 2):
            read += count
        yield Link(name="from disk", bytes_per_s=read / (time.perf_counter() - start))


def try_pinning(most_bytes: int, *, most_s: float = 0.5) -> int:
    """How much memory can be pinned in one piece, as far as was tried: 0 if none.

    Doubles until `most_bytes`, a refusal, or until `most_s` have gone. Each piece is given back before the next.
    torch's allocator may keep what was pinned for later tensors of this process.
    """
    pinned, size, start = 0, min(64 * 2**20, most_bytes), time.perf_counter()
    while 0 < size <= most_bytes and time.perf_counter() - start < most_s:
        try:
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            break
        pinned, size = size, size * 2
    return pinned


def _finished(device: torch.device, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)

    return copy


def _speed(size: int, copy: Callable[[], object]) -> float:
    copy()  # the first touches pages that nobody had, and starts what is started lazily
    fastest_s, begin = float("inf"), time.perf_counter()
    for _ in range(_MOST_REPEATS):
        start = time.perf_counter()
        copy()
        end = time.perf_counter()
        fastest_s = min(fastest_s, end - start)
        if end - begin > _SHARE_S:
            break
    return size / max(fastest_s, 1e-9)
