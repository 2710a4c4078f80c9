"""The disk tier against ``dd`` with direct I/O and the same block size: `python benchmarks/offload.py --case disk`.

Both take turns, and begin in turn: a disk that many share is not equally fast from one second to the next, and what was
just read or written is quicker the second time on many of them, past the page cache too. So each reads a file that was
read before, and a ratio is that of neighbours.
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recollect._offload.disk import CHUNK_BYTES, DiskTier, FileSpan
from recollect._offload.host_memory import aligned_bytes

PIECE_BYTES = 64 * 2**20
WORKERS = 4
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Bytes per second in each round, of dd and of the tier."""

    dd: list[float]
    tier: list[float]

    @property
    def ratio(self) -> float:
        """The tier's speed of dd's, in the middle of the rounds."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.tier, self.dd, strict=True))


def measure_disk(folder: Path, total: int) -> dict[str, Ways]:
    """Writing and reading so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = max(total // PIECE_BYTES, WORKERS)
    data = aligned_bytes(PIECE_BYTES)
    data.random_(0, 255)
    rooms = [aligned_bytes(PIECE_BYTES).zero_() for _ in range(WORKERS)]  # touched: it is the disk that is measured
    writes, reads = Ways(dd=[], tier=[]), Ways(dd=[], tier=[])
    moved = pieces * PIECE_BYTES
    with ThreadPoolExecutor(WORKERS) as workers:
        for number in range(ROUNDS):
            tier = DiskTier(folder)
            keys: list[FileSpan] = []

            def write(tier: DiskTier = tier, keys: list[FileSpan] = keys) -> None:
                keys.extend(workers.map(lambda _: tier.write(data), range(pieces)))

            def read(tier: DiskTier = tier, keys: list[FileSpan] = keys) -> None:
                list(workers.map(lambda item: tier.read(item[1], rooms[item[0] % WORKERS]), enumerate(keys)))

            ours_first = number % 2 == 0
            if ours_first:
                writes.tier.append(moved / time_call(write))
            writes.dd.append(moved / dd_write(folder, moved))
            if not ours_first:
                writes.tier.append(moved / time_call(write))
            dd_read(tier)
            if ours_first:
                reads.tier.append(moved / time_call(read))
            reads.dd.append(moved / dd_read(tier))
            if not ours_first:
                reads.tier.append(moved / time_call(read))
            tier.close()
    return {"write": writes, "read": reads}


def time_call(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def dd_write(folder: Path, total: int) -> float:
    file = folder / "recollect-dd.bin"
    block, count = f"bs={CHUNK_BYTES}", f"count={total // CHUNK_BYTES}"
    seconds = dd("if=/dev/zero", f"of={file}", block, count, "oflag=direct", "conv=fsync")
    file.unlink()
    return seconds


def dd_read(tier: DiskTier) -> float:
    return dd(f"if={tier.path}", "of=/dev/null", f"bs={CHUNK_BYTES}", "iflag=direct")


def dd(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run(["dd", *arguments], check=True, capture_output=True)
    return time.perf_counter() - start
