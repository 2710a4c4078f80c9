"""What `recollect.fit` spends its time on, by phase; for the benchmarks that fit."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from recollect._fit import fit as fitting
from recollect._fit import run, work
from recollect._plan.solvers.bound import LowerBound


class Phases:
    """The time that calls of named functions take, the inner ones taken off the outer ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._open = clock, list[float]()
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def watch(self, stack: contextlib.ExitStack, owner: Any, name: str, phase: str) -> None:
        own = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            started = self._clock()
            try:
                return own(*args, **kwargs)
            finally:
                took = self._clock() - started
                inner = self._open.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + took - inner
                self.counts[phase] = self.counts.get(phase, 0) + 1
                if self._open:
                    self._open[-1] += took

        setattr(owner, name, timed)
        stack.callback(setattr, owner, name, own)

    def __str__(self) -> str:
        return ", ".join(f"{phase} {self.counts[phase]}x {took:.1f} s" for phase, took in self.seconds.items())


@contextlib.contextmanager
def watched(clock: Callable[[], float]) -> Iterator[Phases]:
    """What `recollect.fit` spends its time on meanwhile."""
    phases = Phases(clock)
    with contextlib.ExitStack() as stack:
        phases.watch(stack, run.Runner, "profile_plainly", "profile")
        phases.watch(stack, run.Runner, "measure", "run")
        phases.watch(stack, run.Runner, "measure_gradients", "gradients")
        phases.watch(stack, work, "find_frontier", "solve")
        phases.watch(stack, work, "measured_overheads", "overheads")
        phases.watch(stack, work, "measured_sending", "sending")
        phases.watch(stack, work, "_measure_link", "link")
        phases.watch(stack, LowerBound, "seconds", "bound")
        phases.watch(stack, fitting, "apply", "apply")
        yield phases
