"""The disk tier: one file per run, written and read in large blocks past the page cache, with a checksum of each value.

The file lies in a private directory, can be read by its user only, and is locked as long as its process lives. It is
removed when the tier is closed or the process ends; what a killed process left is found by its missing lock and removed
by the next tier in that directory. Direct I/O wants memory, offset and length in whole blocks: memory that does not
start at one goes through a block-aligned buffer of the thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import os
import secrets
import stat
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recollect._core.errors import OffloadError, TierFullError
from recollect._core.units import format_bytes
from recollect._offload.extents import Extents
from recollect._offload.host_memory import ALIGNMENT, aligned_bytes

_log = logging.getLogger("recollect")

CHUNK_BYTES = 8 * 2**20
_PREFIX, _SUFFIX, _NEW = "recollect-", ".offload", ".new"
_UNLOCKED_S = 60  # a file that is just being made has no lock yet
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """Where in the file a value lies, how long it is, and the checksum of each of its chunks."""

    offset: int
    size: int
    sums: tuple[int, ...]


class DiskTier:
    """A file on disk as a tier.

    Attributes:
        name: ``"disk"``.
        path: of the file.
        is_direct: whether the page cache is bypassed; where the file system cannot, it is used.
        limit: most bytes of the file; None for no limit.

    Args:
        directory: where the file is to be; made if it does not exist. None for one of this user among the temporary
            files.
        limit: most bytes.

    Raises:
        OSError: the directory cannot be made or written to.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tier = DiskTier(folder)
    ...     key = tier.write(torch.arange(4, dtype=torch.uint8))
    ...     back = torch.zeros(4, dtype=torch.uint8)
    ...     tier.read(key, back)
    ...     tier.close()
    >>> back.tolist()
    [0, 1, 2, 3]
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, limit: int | None = None) -> None:
        self.name, self.limit = "disk", limit
        folder = _private_temporary() if directory is None else Path(directory)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = "a file is there" if isinstance(error, FileExistsError) else error.strerror
            message = f"cannot offload to disk in the directory {str(folder)!r}: {why}. Pass another one as directory="
            raise OffloadError(message) from error
        remove_stale(folder)
        self.path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(6)}{_SUFFIX}"
        self._fd, self.is_direct = _create(self.path)
        self._extents = Extents(size=0, alignment=ALIGNMENT)
        self._returned: deque[FileSpan] = deque()
        self._lock = threading.Lock()
        self._bounce = threading.local()
        self._end = weakref.finalize(self, _remove, self._fd, self.path, os.getpid())

    @property
    def used_bytes(self) -> int:
        """Of the file, in use."""
        with self._lock:
            self._sort_returned()
            return self._extents.used_bytes

    def write(self, data: Tensor) -> FileSpan:
        """Write bytes to a free part of the file.

        Raises:
            TierFullError: the limit is reached, or the disk is full.
            OSError: the disk failed.
        """
        size = data.numel()
        offset = self._take(size)
        sums: list[int] = []
        try:
            for start in range(0, size, CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                source = self._aligned(chunk)
                sums.append(checksum(source))
                _write_all(self._fd, source, offset + start)
        except OSError as error:
            self._returned.append(FileSpan(offset=offset, size=size, sums=()))
            if error.errno in _FULL:
                raise TierFullError from error
            raise
        return FileSpan(offset=offset, size=size, sums=tuple(sums))

    def read(self, key: FileSpan, into: Tensor) -> None:
        """Read bytes back, and compare their checksums.

        Raises:
            OffloadError: the file is shorter than it was, or the bytes are others.
            OSError: the disk failed.
        """
        for number, start in enumerate(range(0, key.size, CHUNK_BYTES)):
            target = into[start : start + CHUNK_BYTES]
            length = target.numel()
            is_aligned = target.data_ptr() % ALIGNMENT == 0 and length % ALIGNMENT == 0
            room = target if is_aligned else self._room(length)
            if not _read_all(self._fd, room, key.offset + start):
                message = f"{self.path} ends before byte {key.offset + start + length}: it was truncated"
                raise OffloadError(message)
            if checksum(room) != key.sums[number]:
                message = (
                    f"{self.path}: the bytes at {key.offset + start} are not those that were written (checksum "
                    f"{checksum(room):#x}, expected {key.sums[number]:#x})"
                )
                raise OffloadError(message)
            if room is not target:
                target.copy_(room[:length])

    def free(self, key: FileSpan) -> None:
        """Let others write there. Takes no lock."""
        self._returned.append(key)

    def close(self) -> None:
        """Remove the file."""
        self._end()

    def _take(self, size: int) -> int:
        with self._lock:
            self._sort_returned()
            offset = self._extents.take(size)
            if offset is None:
                more = self._extents.round_up(size)
                total = self._extents.size + more
                if self.limit is not None and total > self.limit:
                    raise TierFullError
                self._extents.grow(total)
                offset = self._extents.take(size)
            assert offset is not None
            return offset

    def _sort_returned(self) -> None:
        while self._returned:
            place = self._returned.popleft()
            self._extents.give_back(place.offset, place.size)

    def _aligned(self, chunk: Tensor) -> Tensor:
        """The same bytes where direct I/O can take them, filled up to whole blocks."""
        size = chunk.numel()
        if chunk.data_ptr() % ALIGNMENT == 0 and size % ALIGNMENT == 0:
            return chunk
        room = self._room(size)
        room[:size].copy_(chunk)
        room[size:].zero_()
        return room

    def _room(self, size: int) -> Tensor:
        """This thread's buffer, as many whole blocks as hold `size`."""
        room: Tensor | None = getattr(self._bounce, "room", None)
        if room is None:
            room = self._bounce.room = aligned_bytes(CHUNK_BYTES)
        return room[: -(-size // ALIGNMENT) * ALIGNMENT]


def checksum(data: Tensor) -> int:
    """Of whole blocks of bytes: a sum of their 64-bit words modulo 2**64, each weighted by an odd number of its place.

    Any one changed word changes it, and so do words or blocks in another order, but for rare cases. CRC-32 runs at 2 to
    4 GB/s a thread, which is slower than many disks; this runs at 14, in two calls that torch gives to no other thread.
    """
    words = data.view(torch.int64).view(-1, ALIGNMENT // 8)
    sums = torch.mv(words, _odd_numbers(words.shape[1]))
    return int(torch.dot(sums, _odd_numbers(sums.numel()))) & (2**64 - 1)


@functools.lru_cache(maxsize=8)
def _odd_numbers(count: int) -> Tensor:
    return torch.arange(1, 2 * count, 2)


def remove_stale(folder: Path) -> None:
    """Remove the files of processes that are gone: nobody holds their locks."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            is_young = time.time() - path.stat().st_mtime < _UNLOCKED_S
            if path.suffix not in (_SUFFIX, _NEW) or (path.suffix == _NEW and is_young):
                continue
            fd = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = os.fstat(fd).st_size
                path.unlink()
                _log.info("removed %s (%s), left behind by a process that has ended", path, format_bytes(size))
            finally:
                os.close(fd)


def _private_temporary() -> Path:
    """This user's own directory among the temporary files; the same each time, so that what was left is found.

    Raises:
        OSError: something else has its name.
    """
    folder = Path(tempfile.gettempdir()) / f"recollect-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        message = f"{folder} is not a private directory of this user. Remove it, or pass `directory`."
        raise PermissionError(message)
    return folder


def _create(path: Path) -> tuple[int, bool]:
    """A new file, locked, and whether it bypasses the page cache. The lock is there before anybody can find it bare."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    direct = getattr(os, "O_DIRECT", 0)
    hidden = path.with_suffix(_NEW)
    try:
        fd, is_direct = os.open(hidden, flags | direct, 0o600), bool(direct)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of file systems without direct I/O
            raise
        with suppress(FileNotFoundError):
            hidden.unlink()
        fd, is_direct = os.open(hidden, flags, 0o600), False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(path)
    except BaseException:
        os.close(fd)
        hidden.unlink()
        raise
    return fd, is_direct


def _remove(fd: int, path: Path, owner: int) -> None:
    os.close(fd)
    if os.getpid() == owner:  # a forked child has the same file
        with suppress(OSError):
            path.unlink()


def _view(data: Tensor) -> memoryview:
    """The bytes of a tensor, which must outlive it; without numpy, which torch may be installed without."""
    room = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())
    return memoryview(room).cast("B")


def _write_all(fd: int, data: Tensor, offset: int) -> None:
    view = _view(data)
    while view:
        count = os.pwrite(fd, view, offset)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[count:], offset + count


def _read_all(fd: int, data: Tensor, offset: int) -> bool:
    """Fill a tensor; says whether the file was long enough."""
    view = _view(data)
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True
