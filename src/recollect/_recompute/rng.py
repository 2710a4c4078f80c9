"""Random generators as a region found them, so that its recomputation draws the same numbers.

At entry each generator is read once; at exit it is read again, and those that did not move are dropped: a region that
drew nothing restores nothing. Philox generators (CUDA and its kin) are read as seed and offset, which stay on the
host: no device synchronisation. Those of the host have no offset: see `host_rng.py`.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from recollect._core.generators import generator_kinds
from recollect._core.patterns import hint_nearest, quote_all
from recollect._core.pytree import Arguments
from recollect._recompute.graph_rng import enter_capture
from recollect._recompute.host_rng import NumpySource, PythonSource, TorchSource, is_same_memory

_NAMES = frozenset({"torch", "python", "numpy"})


class Source(Protocol):
    """One generator: how to read it, put it back and tell two readings apart."""

    def read(self) -> Any: ...
    def write(self, state: Any) -> None: ...
    def same(self, one: Any, other: Any) -> bool: ...


class _StateSource:
    """A generator that can only be read whole: a user's own on the CPU, and those of devices without an offset."""

    __slots__ = ("_generator",)

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def read(self) -> Tensor:
        return self._generator.get_state()

    def write(self, state: Tensor) -> None:
        self._generator.set_state(state)

    def same(self, one: Tensor, other: Tensor) -> bool:
        return is_same_memory(one, other)


class _PhiloxSource:
    """A counter-based generator, by seed and offset."""

    __slots__ = ("_generator",)

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    @property
    def generator(self) -> torch.Generator:
        return self._generator

    def read(self) -> tuple[int, int]:
        return self._generator.initial_seed(), self._generator.get_offset()

    def write(self, state: tuple[int, int]) -> None:
        seed, offset = state
        if self._generator.initial_seed() != seed:
            self._generator.manual_seed(seed)
        self._generator.set_offset(offset)

    def same(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one == other


class _PythonInstance:
    """A generator of Python's that somebody made."""

    __slots__ = ("_generator",)

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def read(self) -> object:
        return self._generator.getstate()

    def write(self, state: Any) -> None:
        self._generator.setstate(state)

    def same(self, one: object, other: object) -> bool:
        return one == other


class _NumpyInstance:
    """A generator of NumPy's that somebody made, as text: a reading holds arrays, or a dict, depending on its kind."""

    __slots__ = ("_generator",)

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def read(self) -> bytes:
        generator = self._generator
        legacy = getattr(generator, "get_state", None)
        return pickle.dumps(generator.bit_generator.state if legacy is None else legacy(legacy=False))

    def write(self, state: bytes) -> None:
        generator, found = self._generator, pickle.loads(state)  # what `read` wrote
        if hasattr(generator, "set_state"):
            generator.set_state(found)
        else:
            generator.bit_generator.state = found

    def same(self, one: bytes, other: bytes) -> bool:
        return one == other


class _DeviceSource:
    """The generator of a device whose module offers no generator objects, through its own get and set functions."""

    __slots__ = ("_device", "_module")

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module, self._device = module, device

    def read(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self._device)
        return state

    def write(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)

    same = _StateSource.same


_CPU, _PYTHON, _NUMPY = TorchSource(), PythonSource(), NumpySource()


def host_sources(kinds: frozenset[str]) -> tuple[Source, ...]:
    """The generators of the host that have these names; NumPy's only if it was imported."""
    return _sources_named(kinds, "numpy" in sys.modules)


@functools.lru_cache(maxsize=64)
def _sources_named(kinds: frozenset[str], has_numpy: bool) -> tuple[Source, ...]:  # noqa: FBT001
    named: dict[str, Source] = {"torch": _CPU, "python": _PYTHON, "numpy": _NUMPY}
    return tuple(source for name, source in named.items() if name in kinds and (has_numpy or name != "numpy"))


def source_of_cpu() -> Source:
    """The way to read the default CPU generator."""
    return _CPU


@functools.lru_cache(maxsize=64)
def _has_offset(kind: str) -> bool:
    """Whether generators of this kind of device count, so that seed and offset say all. Asked of a fresh one."""
    try:
        torch.Generator(kind).get_offset()
    except (RuntimeError, NotImplementedError) as error:
        return "capture" in str(error)  # a capture forbids the question, and only kinds with an offset have captures
    return True


def source_of(generator: torch.Generator) -> Source:
    """The way to read this generator."""
    if generator.device.type != "cpu" and _has_offset(generator.device.type):
        return _PhiloxSource(generator)
    return _StateSource(generator)


def sources_of_own(generators: Iterable[Any], kinds: frozenset[str]) -> list[Source]:
    """The ways to read generators that a function or its modules hold, those of these kinds, each once."""
    sources: list[Source] = []
    hidden = getattr(random.getstate, "__self__", None)  # whose methods are the functions of `random`
    for generator in {id(generator): generator for generator in generators}.values():
        kind = type(generator)
        if kind not in generator_kinds() or generator is hidden:
            continue
        if kind is torch.Generator:
            if "torch" in kinds:
                sources.append(source_of(generator))
        elif kind is random.Random:
            if "python" in kinds:
                sources.append(_PythonInstance(generator))
        elif "numpy" in kinds:
            sources.append(_NumpyInstance(generator))
    return sources


@functools.lru_cache(maxsize=64)
def source_of_device(device: torch.device) -> Source | None:
    """The way to read a device's default generator; None for devices without one (``meta``). Starts up no device."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return None
    generators = getattr(module, "default_generators", None)
    if generators:
        return source_of(generators[device.index or 0])
    return _DeviceSource(module, device) if hasattr(module, "get_rng_state") and device.type != "cpu" else None


@functools.cache
def accelerator() -> tuple[str, ModuleType] | None:
    """The accelerator this torch was built for, its type and its module; None on a CPU-only build."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else (device.type, torch.get_device_module(device))


def accelerator_started() -> bool:
    """Whether the accelerator has been initialised by anyone. Never initialises it."""
    found = accelerator()
    if found is None:
        return False
    started = getattr(found[1], "is_initialized", None)
    return bool(started()) if started is not None else True


def _has_drawn(module: ModuleType) -> bool:
    """Whether a device that has just been initialised has drawn random numbers, as far as its generators can tell."""
    generators = getattr(module, "default_generators", None) or ()
    if not generators or not all(map(_has_offset, {generator.device.type for generator in generators})):
        return True
    return any(generator.get_offset() for generator in generators)


def _sources_of(arguments: Arguments) -> list[Source]:
    """Generators of the devices that the tensors live on (else of the current one), and those among the arguments."""
    leaves = arguments.leaves
    devices = {leaves[index].device for index in arguments.tensors if not leaves[index].is_cpu}
    if len(devices) == 1 and not arguments.objects:  # the usual case, apart because it runs at every call of a region
        source = source_of_device(*devices)
        if source is not None:
            return [source]
    sources: list[Source] = [source_of(item) for item in arguments.objects if isinstance(item, torch.Generator)]
    if len(devices) > 1:
        _warn_of_kinds({device.type for device in devices})
    devices = {device for device in devices if device.type != "meta"}
    if not devices:
        found = accelerator()
        if found is not None and accelerator_started():
            devices.add(torch.device(found[0], torch.accelerator.current_device_index()))
    for device in devices:
        source = source_of_device(device)
        if source is not None:
            sources.append(source)
    return sources


def _warn_of_kinds(kinds: set[str]) -> None:
    if len(kinds) > 1:
        listed = " and ".join(sorted(kinds))
        warnings.warn(
            f"the arguments of a region are on {listed}: their random states are all preserved, but "
            "autocast only for the CPU and the current accelerator",
            stacklevel=2,
        )


def parse_preserve(preserve: bool | Iterable[str]) -> frozenset[str]:  # noqa: FBT001
    """The kinds of generator to preserve.

    >>> sorted(parse_preserve(True)), sorted(parse_preserve(False)), sorted(parse_preserve({"torch", "numpy"}))
    (['numpy', 'python', 'torch'], [], ['numpy', 'torch'])
    >>> parse_preserve("cuda")
    Traceback (most recent call last):
    ...
    ValueError: preserve_rng='cuda': expected True, False or a collection of 'numpy', 'python', 'torch'
    """
    if isinstance(preserve, bool):
        return _NAMES if preserve else frozenset()
    is_collection = isinstance(preserve, Iterable) and not isinstance(preserve, str)
    kinds: frozenset[str] = frozenset(preserve) if is_collection else frozenset()
    if not kinds or not kinds <= _NAMES:
        strange = preserve if isinstance(preserve, str) else min(kinds - _NAMES, key=str, default=None)
        message = f"preserve_rng={preserve!r}: expected True, False or a collection of {quote_all(sorted(_NAMES))}"
        message += hint_nearest(strange, sorted(_NAMES))
        raise ValueError(message)
    return kinds


class RngState:
    """The generators around one execution of a region.

    Life: made at entry; `settle` at exit drops what did not move; `restore` and `put_back` around each recomputation.

    Attributes:
        entries: the generators, and where they stood at entry.
        around_forward: what the function must run under while a CUDA graph is being captured.
    """

    __slots__ = ("_starts_accelerator", "around_forward", "entries")

    def __init__(self, kinds: frozenset[str], arguments: Arguments) -> None:
        self.around_forward: Callable[[str], AbstractContextManager[Any]] | None = None
        self._starts_accelerator = False  # if it does: no device was in use at entry
        self.entries: list[tuple[Source, Any]] = [(source, source.read()) for source in host_sources(kinds)]
        # On a CPU-only build without generators among the arguments there is nothing more to look for.
        if (arguments.objects or accelerator() is not None) and "torch" in kinds:
            self._read_devices(_sources_of(arguments))

    def _read_devices(self, sources: Sequence[Source]) -> None:
        """Read the generators of devices, and those among the arguments."""
        if not sources:
            self._starts_accelerator = accelerator() is not None and not accelerator_started()
            return
        try:
            self.entries += [(source, source.read()) for source in sources]
        except RuntimeError:  # a CUDA graph is being captured
            self._enter_capture(sources)

    def _enter_capture(self, sources: Sequence[Source]) -> None:
        for source in sources:
            if not isinstance(source, _PhiloxSource):
                self.entries.append((source, source.read()))
                continue
            switched, self.around_forward = enter_capture(source.generator)
            if switched is not None:
                self.entries.append((switched, None))

    def add(self, sources: Sequence[Source]) -> None:
        """Generators that were found later, at entry still."""
        self._read_devices(sources)

    def settle(self, region: str) -> RngState | None:
        """At exit: keep the generators that moved; None if none did."""
        found = accelerator() if self._starts_accelerator and accelerator_started() else None
        if found is not None and _has_drawn(found[1]):  # not if only a compiler asked what the device can do
            message = (
                f"region '{region}' initialized the accelerator: its random state before the region is unknown, so "
                "recomputation could not draw the same numbers.\n"
                "Use the device once before the first region (for instance move the model there first), or pass "
                "preserve_rng=False (preserve_rng_state=False in recollect.compat)."
            )
            raise RuntimeError(message)
        moved = None
        for entry in self.entries:  # most regions draw nothing: no list is made for them
            source, state = entry
            now = source.read()
            if now is not state and not source.same(state, now):
                moved = [entry] if moved is None else [*moved, entry]
        if moved is None:
            return None
        self.entries = moved
        return self

    def restore(self) -> list[tuple[Source, Any]]:
        """Before recomputation: set every generator as it was at entry; gives back where they stood."""
        entries = self.entries
        now = [(source, source.read()) for source, _ in entries]
        try:
            for source, state in entries:
                source.write(state)
        except BaseException:
            put_back(now)
            raise
        return now


def put_back(states: list[tuple[Source, Any]]) -> None:
    """After recomputation: set every generator where `restore` found it."""
    for source, state in states:
        source.write(state)
