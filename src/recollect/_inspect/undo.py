"""Puts back what a step changes: to run it once more as it ran first, and to leave no trace in the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recollect._inspect.surroundings import list_generators
from recollect._profile.belongings import Belongings
from recollect._profile.snapshot import Snapshot
from recollect._recompute.rng import Source, put_back

if TYPE_CHECKING:
    from recollect._profile.dry.step import DryStep


class Undo:
    """Parameters, buffers, attributes, gradients, optimizers, random generators and the user's objects, as found.

    Args:
        is_on: whether more than random generators is put back: not where the caller's step goes on, nor on fake
            tensors.
        dry: what the step runs on, if its tensors are fake.

    Attributes:
        snapshot: notes what is written into while the step runs.
        is_on: as given.
    """

    def __init__(self, *, is_on: bool, dry: DryStep | None) -> None:
        self.snapshot, self.is_on = Snapshot(), is_on
        self._dry, self._is_cleared = dry, False
        self._belongings: Belongings | None = None
        self._states: list[tuple[Source, Any]] = []

    def expect(self, *, is_cleared: bool, counters: Iterable[object], belongings: Belongings | None) -> None:
        """Take what is known of the step: see `StepProfiler.take`."""
        if self.is_on:
            self._is_cleared, self._belongings = is_cleared, belongings
            for counter in counters:
                self.snapshot.note_object(counter)

    def note(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Note everything as it is now, before the first run."""
        self._states = [(source, source.read()) for source in list_generators()]
        if self.is_on:
            for module in modules:
                self.snapshot.note_module(module)
            for optimizer in optimizers:
                self.snapshot.note_optimizer(optimizer)

    def clear_gradients(self) -> None:
        """Let a step begin without gradients, if it does."""
        if self._is_cleared:
            self.snapshot.clear_gradients()

    def rewind(self) -> None:
        """Put everything as it was before the step, to run it once more."""
        self.put_back()
        self.clear_gradients()
        if self._dry is not None:
            self._dry.clear_gradients()

    def put_back(self) -> None:
        """Put everything as it was; again, if it was interrupted: what was put back stays so."""
        if self.is_on:
            self.snapshot.restore()
            if self._belongings is not None:
                self._belongings.put_back()
        put_back(self._states)

    @contextmanager
    def steps_kept_aside(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Let an optimizer that steps unwatched, although it did not in the step that was watched, change nothing.

        A step that accumulates gradients does so if it counts its runs where nobody can put that back.
        """
        with ExitStack() as stack:
            for optimizer in optimizers if self.is_on else ():
                handle = optimizer.register_step_pre_hook(lambda one, *_: self.snapshot.before_step(one))
                stack.callback(handle.remove)
            yield
