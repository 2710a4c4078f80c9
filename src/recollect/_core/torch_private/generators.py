"""Where torch's generator of the CPU keeps its state in memory: to compare that takes a fifth of reading it.

Private names: ``Generator._cdata``, the address of the generator, and what lies there: torch's own class for the CPU.
Replaced by: an offset of CPU generators, as those of CUDA have one.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import suppress
from typing import Any

import torch

__all__ = ["find_memory", "memory_at"]

_WORDS = 624  # of a Mersenne Twister
_STATE = struct.Struct(f"QiiQ{_WORDS}Qdddi4xfBxxx")  # as torch writes it: seed, place, words, Gaussians that wait
_BEFORE_WORDS = struct.calcsize("QiII")  # in memory: seed and place


def memory_at(address: int, size: int) -> Any:
    """Memory to be read; its attribute `raw` is a copy."""
    return (ctypes.c_char * size).from_address(address)


def find_memory(generator: torch.Generator) -> Any:
    """The memory that changes whenever the state of a CPU generator does; None if that cannot be shown.

    It is shown on another generator, by changing each word of a state in turn: whatever states torch tells apart, the
    memory must. No operator runs for this, because a mode around the caller would see it.

    >>> generator = torch.Generator()
    >>> memory = find_memory(generator)
    >>> before = memory.raw if memory else None
    >>> _ = torch.rand(1, generator=generator)
    >>> memory is None or memory.raw != before
    True
    """
    try:
        probe = torch.Generator()
        start = _find_start(probe)
        size = min(map(_bytes_at, map(_address_of, (probe, generator))))
    except (AttributeError, OSError, TypeError):  # another C library, or another torch
        return None
    if start is None or not _shows_all(probe, memory_at(_address_of(probe) + start, size - start)):
        return None
    return memory_at(_address_of(generator) + start, size - start)


def _address_of(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


def _bytes_at(address: int) -> int:
    """How many bytes the C library has given for what begins here."""
    size_of = ctypes.PyDLL(None).malloc_usable_size
    size_of.argtypes, size_of.restype = (ctypes.c_void_p,), ctypes.c_size_t
    size: int = size_of(address)
    return size


def _find_start(probe: torch.Generator) -> int | None:
    """How far inside a generator its state begins; None if its words are not found."""
    state = _get(probe)
    if len(state) != _STATE.size:
        return None
    words = struct.pack(f"{_WORDS}I", *_STATE.unpack(state)[4 : 4 + _WORDS])
    address = _address_of(probe)
    found = ctypes.string_at(address, _bytes_at(address)).find(words)
    return found - _BEFORE_WORDS if found >= _BEFORE_WORDS else None


def _shows_all(probe: torch.Generator, memory: Any) -> bool:
    """Whether the memory differs wherever the state of this generator does."""
    numbers = _STATE.unpack(_get(probe))[: 4 + _WORDS]
    _put(probe, _STATE.pack(*numbers, 0.5, 0.25, 0.125, 1, 0.5, 1))  # both Gaussians wait: a change of each shows
    known, before = _get(probe), memory.raw
    for place in range(0, _STATE.size, 4):
        changed = bytearray(known)
        changed[place] ^= 1
        with suppress(RuntimeError):  # torch says that it is none of its states
            _put(probe, bytes(changed))
            if _get(probe) != known and memory.raw == before:
                return False
        _put(probe, known)
    return True


def _get(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _put(generator: torch.Generator, state: bytes) -> None:
    tensor = generator.get_state()
    ctypes.memmove(tensor.data_ptr(), state, len(state))
    generator.set_state(tensor)
