"""The generators of the host, torch's, Python's and NumPy's, read whole only where they have moved since the last time.

All three are Mersenne Twisters of 2.5 KB. To read one whole takes 0.5, 10 and 40 µs; to compare the memory that holds
it with a copy takes 0.1 µs. So a whole reading comes with a copy of that memory, and while the two are equal, the
reading still holds. Where the memory lies is asked of a generator made for the purpose, and believed only if its state
is found there word for word; otherwise, as under another interpreter, every reading is whole.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.generators import find_memory, memory_at

# PyDLL: holding the GIL over a few KB is cheaper than giving it away.
memcmp = ctypes.PyDLL("msvcrt" if sys.platform == "win32" else None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memcmp.restype = ctypes.c_int

_WORDS = 624
_NUMPY_BYTES = struct.calcsize(f"{_WORDS}Ii")  # the words, and which is next
_HEADER_BYTES = object.__basicsize__  # what every object begins with: its count of references changes all the time
_GAUSSIAN = struct.Struct("id")  # as C lays out whether a second Gaussian waits, and which
_UNLIKELY = 0.7310585786300049  # one that nothing else in an object looks like


class _HostSource(ABC):
    """A generator of the host; a `recollect._recompute.rng.Source`.

    Where its memory is known, a reading is kept with a copy of that memory. Subclasses compare the two themselves, in
    one function: regions ask at entry and at exit. To copy the memory and compare Python's bytes takes 0.1 µs, a third
    of what a call of C's memcmp takes from here.
    """

    __slots__ = ("_is_known", "_last")

    def __init__(self) -> None:
        self._is_known: bool | None = None  # where its memory is; None before anyone asked
        self._last: tuple[Any, ...] | None = None  # a state, and the memory that it stands for

    @abstractmethod
    def read(self) -> Any: ...

    @abstractmethod
    def write(self, state: Any) -> None: ...

    def same(self, one: Any, other: Any) -> bool:
        return one is other or _is_equal(one, other)

    def _read_anew(self) -> Any:
        """Read it whole, and keep that."""
        if self._is_known is None:
            self._is_known = sys.implementation.name == "cpython" and self._find_memory()
        if not self._is_known:
            return self._read_whole()
        copy, state = self._copy(), self._read_whole()
        if self._copy() == copy:  # else another thread draws, and the two do not belong together
            self._last = (state, *copy)
        return state

    @abstractmethod
    def _read_whole(self) -> Any: ...

    @abstractmethod
    def _find_memory(self) -> bool: ...

    @abstractmethod
    def _copy(self) -> tuple[Any, ...]: ...


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two states are: numbers, arrays of NumPy, and dicts of those."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    is_same = one == other
    return bool(is_same.all() if hasattr(is_same, "all") else is_same)


class TorchSource(_HostSource):
    """torch's default generator of the CPU."""

    __slots__ = ("_generator", "_memory")

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.default_generator
        self._memory: Any = None

    def read(self) -> Tensor:
        last = self._last
        if last is not None:
            state: Tensor = last[0]
            if self._memory.raw == last[1]:
                return state
        return self._read_anew()  # type: ignore[no-any-return]

    def write(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def same(self, one: Tensor, other: Tensor) -> bool:
        return one is other or is_same_memory(one, other)

    def _read_whole(self) -> Tensor:
        return self._generator.get_state()

    def _find_memory(self) -> bool:
        self._memory = find_memory(self._generator)
        return self._memory is not None

    def _copy(self) -> tuple[bytes]:
        return (self._memory.raw,)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two states of a generator are equal. Not torch.equal: no mode around a region must see what we do."""
    return not memcmp(one.data_ptr(), other.data_ptr(), one.numel())


class PythonSource(_HostSource):
    """Python's `random`: the words of its hidden instance, and the second Gaussian, which is an attribute."""

    __slots__ = ("_generator", "_memory")

    def read(self) -> Any:
        last = self._last
        if last is not None:
            state, words, gaussian = last
            if self._memory.raw == words and self._generator.gauss_next == gaussian:
                return state
        return self._read_anew()

    def write(self, state: Any) -> None:
        random.setstate(state)

    def _read_whole(self) -> object:
        return random.getstate()

    def _find_memory(self) -> bool:
        own, probe = getattr(random.getstate, "__self__", None), random.Random(1)
        words: tuple[int, ...] = probe.getstate()[1]
        expected = struct.pack(f"i{_WORDS}I", words[-1], *words[:-1])
        self._generator: Any = own
        self._memory = memory_at(id(own) + _HEADER_BYTES, len(expected))
        has_room = random.Random.__basicsize__ >= _HEADER_BYTES + len(expected)
        is_there = has_room and ctypes.string_at(id(probe) + _HEADER_BYTES, len(expected)) == expected
        return is_there and type(own) is random.Random

    def _copy(self) -> tuple[bytes, float | None]:
        return self._memory.raw, self._generator.gauss_next


class NumpySource(_HostSource):
    """NumPy's global generator: the words of the bit generator in use, and the second Gaussian beside it."""

    __slots__ = ("_ask", "_gaussian", "_place", "_twister")

    def read(self) -> Any:
        last = self._last
        if last is not None:
            state, bits, memory, words, gaussian = last
            if self._ask() is bits and memory.raw == words and self._gaussian.raw == gaussian:
                return state
        return self._read_anew()

    def write(self, state: Any) -> None:
        sys.modules["numpy"].random.set_state(state)

    def _read_whole(self) -> Any:
        return sys.modules["numpy"].random.get_state(legacy=False)  # a dict, whatever the bit generator

    def _find_memory(self) -> bool:
        numbers = sys.modules["numpy"].random
        own, gaussian = getattr(numbers.get_state, "__self__", None), _find_gaussian(numbers)
        self._ask: Any = getattr(numbers, "get_bit_generator", None)
        self._twister = numbers.MT19937
        self._place: tuple[Any, Any] = (None, None)  # the bit generator, and its memory
        self._gaussian = memory_at(id(own) + (gaussian or 0), _GAUSSIAN.size)
        return gaussian is not None and self._ask is not None and type(own) is numbers.RandomState

    def _copy(self) -> tuple[Any, ...]:
        bits: Any = self._ask()
        if type(bits) is not self._twister:
            return (object(),)  # equal to nothing: it is read whole each time
        if self._place[0] is not bits:
            self._place = (bits, memory_at(bits.ctypes.state_address, _NUMPY_BYTES))
        return *self._place, self._place[1].raw, self._gaussian.raw


def _find_gaussian(numbers: ModuleType) -> int | None:
    """How far inside a `RandomState` it says whether a second Gaussian waits, and which; None if its memory is other.

    Args:
        numbers: ``numpy.random``.
    """
    bits = numbers.MT19937(1)
    probe, size = numbers.RandomState(bits), numbers.RandomState.__basicsize__
    name, key, position, *_ = probe.get_state()
    expected = struct.pack(f"{_WORDS}Ii", *key.tolist(), position)
    if ctypes.string_at(bits.ctypes.state_address, len(expected)) != expected:
        return None
    found = None
    for waits, value in ((1, _UNLIKELY), (0, 0.0)):
        probe.set_state((name, key, position, waits, value))
        memory = ctypes.string_at(id(probe), size)
        if found is None:
            found = memory.find(struct.pack("d", _UNLIKELY)) - (_GAUSSIAN.size - struct.calcsize("d"))
        if found < 0 or _GAUSSIAN.unpack_from(memory, found) != (waits, value):
            return None
    return found
