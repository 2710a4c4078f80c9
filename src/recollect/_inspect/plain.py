"""Runs a step as it runs without us, and times it.

On a device the optimizer's step is timed apart: what it writes is copied on the device itself, in the memory that the
activations had, and put back at once. Where that is not enough room it is left out, and estimated by whoever asks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from recollect._core.torch_private.engine import around_passes
from recollect._profile.attribution import Plain
from recollect._profile.snapshot import tensors_of_optimizer

_FEWEST, _MOST = 2, 8
_SHORT_S = 0.25
"""Steps are run until they have taken this long together, `_FEWEST` to `_MOST` of them.

Among several ranks it is always `_FEWEST`: steps wait for each other there, so all must run equally many.
"""
_NEW_STATES = 3  # what an optimizer without state makes for each parameter, and what it takes while it steps, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTimes:
    """How long a step takes unwatched.

    Attributes:
        body: the step; without the optimizer's if that is apart.
        optimizer: the optimizer's step, if it was timed apart.
        is_apart: whether the optimizer's step was left out of `body`.
    """

    body: Plain
    optimizer: Plain | None
    is_apart: bool


class _Stopwatch:
    """Host and wall time of what runs, pauses left out, and what of the host's was backward."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.host_s = self.wall_s = self.backward_s = 0.0
        self._started_s = 0.0
        self._passes = 0

    def start(self) -> None:
        self._wait()
        self._started_s = time.perf_counter()

    def stop(self) -> None:
        self.host_s += time.perf_counter() - self._started_s
        self._wait()
        self.wall_s += time.perf_counter() - self._started_s

    @contextmanager
    def backward(self, _roots: tuple[Any, ...], _is_last: bool) -> Generator[None]:  # noqa: FBT001
        """Around a backward pass; one inside of another belongs to that."""
        self._passes += 1
        started_s = self._read()
        try:
            yield
        finally:
            self._passes -= 1
            self.backward_s += 0.0 if self._passes else self._read() - started_s

    def _read(self) -> float:
        return self.host_s + time.perf_counter() - self._started_s


def time_plainly(
    step: Callable[[], object],
    *,
    rewind: Callable[[], None],
    device: torch.device,
    apart: Sequence[torch.optim.Optimizer],
    peak_bytes: int,
) -> PlainTimes:
    """Run a step a few times and time it.

    Args:
        step: runs it.
        rewind: puts everything as it was before the step; called before each run.
        device: where it runs.
        apart: optimizers whose step is timed apart, so that nothing of it lasts.
        peak_bytes: what the step takes on the device.
    """
    wait = _waits_for(device)
    optimizers = _Apart(apart, wait, peak_bytes, device)
    bodies: list[Plain] = []
    spent_s = 0.0
    most = _FEWEST if _has_peers() else _MOST
    while len(bodies) < _FEWEST or (spent_s < _SHORT_S and len(bodies) < most):
        rewind()
        watch = _Stopwatch(wait)
        with optimizers.around(watch), around_passes(watch.backward):
            watch.start()
            step()
            watch.stop()
        spent_s += watch.wall_s
        bodies.append(Plain(wall_s=watch.wall_s, host_s=watch.host_s, backward_s=watch.backward_s))
    if len(bodies) > _FEWEST:
        bodies = bodies[1:]  # the first may still be warming up
    choose = statistics.median if len(bodies) > _FEWEST else min
    host_s = choose([one.host_s for one in bodies])
    share = statistics.median((one.backward_s or 0.0) / one.host_s for one in bodies)
    body = Plain(wall_s=choose([one.wall_s for one in bodies]), host_s=host_s, backward_s=share * host_s)
    return PlainTimes(body=body, optimizer=optimizers.timed, is_apart=bool(apart))


def _has_peers() -> bool:
    """Whether this process trains together with others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _waits_for(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu" or not torch.accelerator.is_available():
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


class _Apart:
    """Lets optimizers step apart from the rest of the step, once, and not at all after that."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        wait: Callable[[], None],
        peak_bytes: int,
        device: torch.device,
    ) -> None:
        self._optimizers, self._wait, self._peak_bytes, self._device = optimizers, wait, peak_bytes, device
        self._times: dict[int, Plain] = {}
        self._has_room = True

    @property
    def timed(self) -> Plain | None:
        """How long all of them take together; None if none stepped, or one could not."""
        if not self._times or not self._has_room:
            return None
        return Plain(
            wall_s=sum(one.wall_s for one in self._times.values()),
            host_s=sum(one.host_s for one in self._times.values()),
        )

    @contextmanager
    def around(self, watch: _Stopwatch) -> Generator[None]:
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(self._replaced(optimizer, watch))
            yield

    @contextmanager
    def _replaced(self, optimizer: torch.optim.Optimizer, watch: _Stopwatch) -> Generator[None]:
        attributes = vars(optimizer)
        before = {name: attributes[name] for name in ("step",) if name in attributes}
        step = optimizer.step

        def step_apart(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            if closure is not None:
                return step(closure, **options)
            if id(optimizer) not in self._times and self._has_room:
                watch.stop()
                self._time(optimizer, lambda: step(**options))
                watch.start()
            return None

        attributes["step"] = step_apart
        try:
            yield
        finally:
            attributes.pop("step", None)
            attributes.update(before)

    def _time(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        states = tensors_of_optimizer(optimizer)
        size = sum(tensor.nbytes for tensor in trained)
        needed = size + sum(tensor.nbytes for tensor in states) + (1 if states else _NEW_STATES) * size
        self._has_room = needed <= self._peak_bytes - torch.cuda.memory_allocated(self._device)
        if not self._has_room:
            return
        kept = [(tensor, tensor.detach().clone()) for tensor in (*trained, *states)]
        try:
            step()  # makes the state, where there is none
            watch = _Stopwatch(self._wait)
            watch.start()
            step()
            watch.stop()
            self._times[id(optimizer)] = Plain(wall_s=watch.wall_s, host_s=watch.host_s)
        finally:
            _put_back(kept)


def _put_back(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in kept:
            tensor.copy_(copy)
