"""Whether an exception says that memory ran out, and the numbers it gives."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from recollect._core.units import parse_bytes

# What errors without a class of their own say: torch's CPU allocator (the second on Windows), MPS, CUDA and HIP
# themselves, and the libraries that allocate behind torch's back.
_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "ErrorOutOfMemory",
    "STATUS_ALLOC_FAILED",
)
# What libraries say for any failure, also where they found no memory for themselves: cuDNN met on an H200.
_UNCLEAR_TEXTS = ("STATUS_INTERNAL_ERROR", "STATUS_NOT_INITIALIZED")
_LITTLE = 0.02  # of a device: with no more than that left, it was the memory
_SIZE = r"([0-9.]+ ?(?:[KMGT]i?B|bytes))"
_REQUESTED = re.compile(rf"(?:[Tt]ried to allocate|[Uu]nable to allocate) {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOWED = re.compile(rf"{_SIZE} allowed|max allowed: {_SIZE}")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch|MPS allocated: {_SIZE}")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_OTHERS = re.compile(rf"other allocations: {_SIZE}")
_INDEX = re.compile(r"\b(?:GPU|device) (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What an exception says about the memory that was missing; None where it does not say."""

    message: str
    device: str
    """``"cuda:0"``, ``"cpu"``."""
    requested_bytes: int | None = None
    total_bytes: int | None = None
    """What the device has, or what this process is allowed of it."""
    free_bytes: int | None = None
    """What the device could still give to this process."""
    allocated_bytes: int | None = None
    """What tensors and temporaries took of it then."""
    unused_bytes: int | None = None
    """What the allocator had reserved and not given out: in pieces that were too small."""

    @property
    def available_bytes(self) -> int | None:
        """What could have been given out, were it in one piece."""
        return None if self.free_bytes is None else self.free_bytes + (self.unused_bytes or 0)

    @property
    def missing_bytes(self) -> int | None:
        """What would have had to be freed; 0 if there was enough, but not in one piece."""
        if self.requested_bytes is None:
            return None
        return max(0, self.requested_bytes - (self.available_bytes or 0))

    @property
    def is_fragmentation(self) -> bool:
        """Whether there was enough memory, in pieces."""
        return self.requested_bytes is not None and (self.available_bytes or 0) >= self.requested_bytes


def read_shortage(error: BaseException) -> Shortage | None:
    """What an exception says about missing memory; None if it is about anything else.

    >>> read_shortage(MemoryError()).device
    'cpu'
    >>> read_shortage(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes."))
    Shortage(message="DefaultCPUAllocator: ...", device='cpu', requested_bytes=4000, ...)
    >>> read_shortage(RuntimeError("shapes cannot be multiplied")) is None
    True
    """
    is_devices = isinstance(error, torch.OutOfMemoryError)
    is_hosts = isinstance(error, MemoryError)
    if not is_devices and not is_hosts and not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if not is_devices and not is_hosts and not _says_so(text):
        return None
    total, allowed, free = _find(_TOTAL, text), _find(_ALLOWED, text), _find(_FREE, text)
    allocated, unused = _find(_ALLOCATED, text), _find(_UNUSED, text)
    if allowed is not None and allocated is not None:
        left = max(0, allowed - allocated - (unused or 0) - (_find(_OTHERS, text) or 0))
        free = left if free is None else min(left, free)
    return Shortage(
        message=text.strip().partition("\n")[0] or type(error).__name__,
        device="cpu" if is_hosts else _find_device(text, is_devices=is_devices),
        requested_bytes=_find(_REQUESTED, text),
        total_bytes=total if allowed is None else allowed,
        free_bytes=free,
        allocated_bytes=allocated,
        unused_bytes=unused,
    )


def _says_so(text: str) -> bool:
    """Whether an error without a class of its own is about memory."""
    if any(known in text for known in _TEXTS):
        return True
    if not any(known in text for known in _UNCLEAR_TEXTS) or not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < _LITTLE * total


def _find(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    return parse_bytes(next(filter(None, found.groups())).replace("bytes", "B"))


def _find_device(text: str, *, is_devices: bool) -> str:
    kinds = {"CUDA": "cuda", "HIP": "cuda", "hip": "cuda", "CUBLAS": "cuda", "CUDNN": "cuda", "XPU": "xpu"}
    if "MPS " in text:
        return "mps"
    kind = next((kind for word, kind in kinds.items() if word in text), None)
    if kind is None:
        accelerator = torch.accelerator.current_accelerator() if is_devices else None
        if accelerator is None:
            return "cpu"
        kind = accelerator.type
    index = _INDEX.search(text)
    if index is not None:
        return f"{kind}:{index[1]}"
    return f"{kind}:{torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0}"
