"""Random numbers in regions while a CUDA graph is being captured.

A captured generator cannot be rewound: its offset lives on the device and moves at each replay. So a region that draws
needs two generator states that start equal and move in step: forward draws from one, recomputation from the other.
States must be registered with the graph before its capture begins, which `graph_rng` does. Without it, a region that
draws during a capture raises before the draw, and one that draws nothing needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from recollect._core.errors import CaptureError
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.schemas import draws, is_random

_SPREAD = 0x9E3779B97F4A7C15  # odd: consecutive regions get far-apart seeds


class _Graph(Protocol):
    def register_generator_state(self, generator: torch.Generator) -> None: ...


class Pair:
    """Two states of one generator that start equal: forward draws from one, one recomputation from the other."""

    __slots__ = ("_again", "forward")

    def __init__(self, generator: torch.Generator, number: int) -> None:
        seed, offset = generator.initial_seed(), generator.get_offset()
        self.forward = generator.clone_state()
        self.forward.manual_seed((seed ^ ((number + 1) * _SPREAD)) % (1 << 63))
        self.forward.set_offset(offset)
        self._again: torch.Generator | None = self.forward.clone_state()

    def register(self, graph: _Graph) -> None:
        """Let both states move with the graph's replays."""
        assert self._again is not None
        graph.register_generator_state(self.forward)
        graph.register_generator_state(self._again)

    def again(self) -> torch.Generator:
        """The state for recomputation, once."""
        state, self._again = self._again, None
        if state is None:
            message = (
                "a region with random numbers is recomputed twice within one CUDA-graph capture: there is one spare "
                "state per region.\nCapture one backward per forward, without retain_graph."
            )
            raise CaptureError(message)
        return state


class _Pool:
    __slots__ = ("generator", "pairs", "size")

    def __init__(self, generator: torch.Generator, pairs: list[Pair]) -> None:
        self.generator, self.pairs, self.size = generator, pairs, len(pairs)


_pool: ContextVar[_Pool | None] = ContextVar("recollect_graph_rng", default=None)
_inside: ContextVar[bool] = ContextVar("recollect_graph_rng_inside", default=False)


@contextmanager
def graph_rng(graph: _Graph, *, regions: int) -> Iterator[None]:
    """Let regions draw random numbers inside the CUDA-graph capture in this block.

    Enter it before the capture. Each region call inside draws from a stream of its own, seeded from the device's
    generator, so the numbers differ from those of an eager step; every replay draws new ones, the same in forward and
    recomputation. Regions nested in a drawing region must not draw.

    Args:
        graph: the ``torch.cuda.CUDAGraph`` that will be captured.
        regions: at least as many as there are region calls in the captured step; each costs two small states.

    Raises:
        ValueError: `regions` is not a positive number.
        RuntimeError: no accelerator is in use.

    >>> import recollect
    >>> with recollect.graph_rng(None, regions=0):
    ...     pass
    Traceback (most recent call last):
    ...
    ValueError: regions=0: expected at least 1, the number of region calls in the captured step
    """
    if not isinstance(regions, int) or regions < 1:
        message = f"regions={regions!r}: expected at least 1, the number of region calls in the captured step"
        raise ValueError(message)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        message = "graph_rng needs an accelerator, but torch finds none"
        raise RuntimeError(message)
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    generator = generators[torch.accelerator.current_device_index()]
    pairs = [Pair(generator, number) for number in range(regions)]
    for pair in pairs:
        pair.register(graph)
    token = _pool.set(_Pool(generator, pairs))
    try:
        yield
    finally:
        _pool.reset(token)


class SwitchedSource:
    """A generator whose state is exchanged as a whole, which a capture allows."""

    __slots__ = ("_generator", "_pair")

    def __init__(self, generator: torch.Generator, pair: Pair) -> None:
        self._generator, self._pair = generator, pair

    def read(self) -> torch.Generator:
        """The state in force."""
        return self._generator.graphsafe_get_state()

    def write(self, state: torch.Generator | None) -> None:
        """Put a state in force; None stands for the pair's state for recomputation."""
        self._generator.graphsafe_set_state(self._pair.again() if state is None else state)

    def same(self, _one: object, _other: object) -> bool:
        """Never known: the offset cannot be read."""
        return False


def enter_capture(
    generator: torch.Generator,
) -> tuple[SwitchedSource | None, Callable[[str], AbstractContextManager[Any]]]:
    """For a region entered during a capture: what recomputation restores, and what forward runs under."""
    pool = _pool.get()
    if pool is None or pool.generator is not generator or _inside.get():
        return None, _RandomWatch
    if not pool.pairs:
        message = (
            f"graph_rng(regions={pool.size}): the captured step calls more regions than that.\n"
            "Raise the number; more than needed does no harm."
        )
        raise CaptureError(message)
    pair = pool.pairs.pop()
    return SwitchedSource(generator, pair), lambda _region: _drawing_from(generator, pair)


@contextmanager
def _drawing_from(generator: torch.Generator, pair: Pair) -> Iterator[None]:
    before = generator.graphsafe_get_state()
    token = _inside.set(True)
    generator.graphsafe_set_state(pair.forward)
    try:
        yield
    finally:
        generator.graphsafe_set_state(before)
        _inside.reset(token)


class _RandomWatch(DispatchMode):
    """Raises before an operator draws random numbers on a device that is being captured."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self._region = region

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator unless it draws."""
        if is_random(func) and draws(func, args, kwargs):
            message = (
                f"region '{self._region}' draws random numbers ({func}) while a CUDA graph is being captured: "
                "recomputation could not draw them again.\n"
                "Enter `recollect.graph_rng(graph, regions=...)` before the capture (regions nested in a drawing one "
                "must not draw), or pass preserve_rng=False if the numbers may differ."
            )
            raise CaptureError(message)
        return func(*args, **kwargs)
