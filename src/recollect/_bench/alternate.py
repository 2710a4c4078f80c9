"""The measuring loop of all benchmarks: the candidates take turns in one process, so that noise hits everyone."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one candidate took: a step time for each round, and the allocator's peak (accelerators only)."""

    rounds_s: tuple[float, ...]
    peak_bytes: int | None

    @property
    def median_s(self) -> float:
        """The middle one of the rounds."""
        return statistics.median(self.rounds_s)

    @property
    def best_s(self) -> float:
        """The quickest of the rounds."""
        return min(self.rounds_s)

    def plus(self, other: "Timing") -> "Timing":
        """The time of both, round by round."""
        pairs = zip(self.rounds_s, other.rounds_s, strict=True)
        return Timing(rounds_s=tuple(own + others for own, others in pairs), peak_bytes=None)

    def minus(self, other: "Timing") -> "Timing":
        """The time beyond `other`, round by round: what drifts between rounds cancels."""
        pairs = zip(self.rounds_s, other.rounds_s, strict=True)
        return Timing(rounds_s=tuple(own - others for own, others in pairs), peak_bytes=None)

    def times(self, factor: float) -> "Timing":
        """The time scaled, as from a whole graph to one region of it."""
        return Timing(rounds_s=tuple(own * factor for own in self.rounds_s), peak_bytes=None)


def alternate(
    steps: Mapping[str, Step],
    *,
    device: torch.device,
    rounds: int,
    repeats: int,
    of_round: Callable[[Sequence[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each step `repeats` times in a row, after one untimed run, and go round all steps `rounds` times.

    `of_round` makes one time of a round's repeats, `clock` tells the time in seconds. Every second round goes
    backwards, so that nobody always follows the same neighbour. The garbage collector runs between turns and not within
    them, as `timeit` does it.
    """
    on_accelerator = device.type != "cpu"
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, int] = {}
    order = list(steps)
    for step in steps.values():  # warm up: lazy initialisation, library handles, allocator pools
        step()
    gc.collect()
    is_frozen = gc.get_freeze_count() > 0  # then by the caller, who wants it to stay so
    if not is_frozen:
        gc.freeze()  # what packages have imported need not be walked over between turns
    for turn in range(rounds):
        for name in order if turn % 2 == 0 else order[::-1]:
            gc.collect()
            gc.disable()
            try:
                steps[name]()
                if on_accelerator:
                    torch.accelerator.synchronize(device)
                    torch.accelerator.reset_peak_memory_stats(device)
                times[name].append(of_round(_timed(steps[name], device, repeats, clock)))
            finally:
                gc.enable()
            if on_accelerator:
                peaks[name] = max(peaks.get(name, 0), torch.accelerator.max_memory_allocated(device))
    if not is_frozen:
        gc.unfreeze()
    return {name: Timing(rounds_s=tuple(own), peak_bytes=peaks.get(name)) for name, own in times.items()}


def _timed(step: Step, device: torch.device, repeats: int, clock: Callable[[], float]) -> list[float]:
    times = []
    for _ in range(repeats):
        start = clock()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(clock() - start)
    return times
