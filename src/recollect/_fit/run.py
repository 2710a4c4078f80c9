"""Runs the step that is to fit, plain or under a plan, and leaves everything as it was."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from recollect._apply.function import name_of
from recollect._apply.targets import by_name, find_targets
from recollect._core.calls import Category, Phase
from recollect._core.profiles import Profile
from recollect._fit.batches import Invocation
from recollect._fit.clearing import Clearing
from recollect._fit.compiled import as_written, hides_memory
from recollect._fit.gradients import GradientNorms
from recollect._fit.shapes import SeenShapes
from recollect._inspect.calling import explain_untrained, is_lightning
from recollect._inspect.oom.error import read_shortage
from recollect._inspect.profile import measure_step, profile_step
from recollect._inspect.surroundings import device_of
from recollect._selective.knowledge import Learned

_log = logging.getLogger("recollect")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stepping:
    """What an optimizer takes that steps after backward: the same under every plan, so one profile tells it.

    Attributes:
        state_bytes: its state, which is there throughout the step.
        peak_bytes: the most while it steps.
        seconds: how long that takes.
    """

    state_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


class Runner:
    """Profiles one call of a model, or of a step that works with it.

    Args:
        model: whose modules may become regions.
        call: what is run.
        optimizer: whose state and step are counted.
        has_gradients: whether there are gradients when it begins, as there are for all micro-batches but the first. A
            step that clears them after its forward is found out.
        progress: called now and then with a number of things done and of things to do, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Invocation,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
        *,
        has_gradients: bool = False,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> None:
        self._model, self._call, self._has_gradients = model, call, has_gradients
        self._optimizer, self._progress = optimizer, progress
        self._stepping: _Stepping | None = None

    def profile_plainly(self, gradients: GradientNorms | None = None) -> Profile:
        """The step as it is now: a real one if there is room for it, else one on fake tensors.

        Args:
            gradients: notes those of a real step, which then runs once more for it.
        """
        try:
            return self._profile_all(once_more=None if gradients is None else gradients.watching())
        except (RuntimeError, MemoryError) as error:
            if read_shortage(error) is None:
                if self._call.doubt and is_lightning(self._model):
                    error.add_note(self._call.doubt)
                raise
            _log.info("recollect.fit: the plain step does not fit; it is profiled on fake tensors")
        except (TypeError, AttributeError) as error:
            if self._call.doubt:
                error.add_note(self._call.doubt)
            raise
        gc.collect()
        torch.cuda.empty_cache()
        return self._profile_all(dry=True)

    def _profile_all(self, *, dry: bool = False, once_more: AbstractContextManager[None] | None = None) -> Profile:
        """The step with its optimizer's."""
        called, clearing = SeenShapes(), Clearing(self._model)
        is_step = self._call.function is not self._model
        with called.watching(self._model), clearing.watching() if is_step else nullcontext():
            seen = self._profile(self._optimizer, dry=dry, once_more=once_more)
        if (
            clearing.finds_gradients and not self._has_gradients
        ):  # each step but the first begins with those of the last
            self._has_gradients = True
            seen = self._profile(self._optimizer, dry=dry)
        self._stepping = _read_stepping(seen)
        if seen.forward_count == len(seen.calls) and self._call.function is not self._model:
            untrained = explain_untrained(self._model)
            message = f"step={name_of(self._call.function)} ran no backward and returned no loss to run it on" + (
                f", {untrained}"
                if untrained
                else ": call loss.backward() in it, or return the loss, neither detached nor as a number"
            )
            raise ValueError(message)
        if not called.shapes and not any(call.module for call in seen.calls[: seen.forward_count]):
            kind = type(self._model).__name__
            message = (
                f"step={name_of(self._call.function)} never called the {kind} that recollect.fit was given, nor any "
                "module in it: it runs another model, or a copy.\n"
                f"Pass the model that the step runs, or let the step run this {kind}"
            )
            raise ValueError(message)
        return seen

    def measure(self, learned: Learned | None = None) -> tuple[int | None, float | None]:
        """The peak and the time of a step as it is now; no peak if memory ran out.

        The optimizer is not followed again, which takes longer than some steps: what was seen of it before counts.

        Args:
            learned: where regions write what they learn; by default it is forgotten.
        """
        gc.collect()
        known = self._stepping
        is_on_cuda = device_of([self._model], (self._call.args, self._call.kwargs)).type == "cuda"
        try:
            with as_written(self._model) if hides_memory(self._model) else nullcontext():
                if known is not None and is_on_cuda:
                    return self._measure_by_allocator(known, learned)
                return self._measure_by_profile(known, learned)
        except (RuntimeError, MemoryError) as error:
            if read_shortage(error) is None:
                raise
            torch.cuda.empty_cache()
            return None, None

    def _measure_by_allocator(self, known: _Stepping, learned: Learned | None) -> tuple[int, float | None]:
        call = self._call
        with self._with_gradients():
            found = measure_step(
                call.function,
                call.args,
                dict(call.kwargs),
                model=self._model,
                loss=call.loss,
                optimizer=self._optimizer,
                progress=self._progress,
                learned=learned,
            )
        missing_bytes = max(0, known.state_bytes - found.state_bytes)
        peak = max(found.peak_bytes + missing_bytes, known.peak_bytes)
        return peak, None if found.step_s is None else found.step_s + known.seconds

    def _measure_by_profile(self, known: _Stepping | None, learned: Learned | None) -> tuple[int, float | None]:
        seen = self._profile(self._optimizer if known is None else None, learned=learned)
        own = _read_stepping(seen)
        more = _Stepping() if known is None or own.peak_bytes else known
        missing_bytes = max(0, more.state_bytes - own.state_bytes)
        peak = max(seen.peak_bytes + missing_bytes, more.peak_bytes)
        return peak, None if seen.step_s is None else seen.step_s + more.seconds

    def measure_gradients(self) -> dict[str, float] | None:
        """How large the gradients are in a step as it is now, of what this process has; None if memory ran out."""
        gradients = GradientNorms(self._model)
        try:
            with gradients.watching():
                self._profile(None, is_timed=False)
        except (RuntimeError, MemoryError) as error:
            if read_shortage(error) is None:
                raise
            torch.cuda.empty_cache()
            return None
        return gradients.read()

    def _profile(
        self,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
        *,
        dry: bool = False,
        is_timed: bool = True,
        once_more: AbstractContextManager[None] | None = None,
        learned: Learned | None = None,
    ) -> Profile:
        call = self._call
        with self._with_gradients():
            seen = profile_step(
                call.function,
                call.args,
                dict(call.kwargs),
                model=self._model,
                loss=call.loss,
                optimizer=optimizer,
                dry=dry,
                name=type(self._model).__name__,
                timed=is_timed,
                progress=self._progress,
                once_more=once_more,
                learned=learned,
            )
        return seen if call.function is self._model else keep_within(seen, self._model)

    def _with_gradients(self) -> AbstractContextManager[None]:
        return _gradients_present(self._model) if self._has_gradients else nullcontext()


def _read_stepping(profile: Profile) -> _Stepping:
    """What the optimizer of a profiled step takes; nothing if none stepped."""
    steps = [number for number, call in enumerate(profile.calls) if call.phase is Phase.OPTIMIZER]
    timeline = profile.timeline
    states = (
        size
        for size, storage in zip(timeline.sizes, profile.storages, strict=True)
        if storage.category is Category.OPTIMIZER and storage.made_at is None
    )
    return _Stepping(
        state_bytes=sum(states),
        peak_bytes=max((timeline.bytes_at[number] for number in steps), default=0),
        seconds=sum(profile.calls[number].seconds or 0.0 for number in steps),
    )


@contextmanager
def _gradients_present(model: nn.Module) -> Iterator[None]:
    """Let all trained parameters have gradients meanwhile."""
    without = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is None]
    try:
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter in without:
            parameter.grad = None


def keep_within(profile: Profile, model: nn.Module) -> Profile:
    """The profile with modules of this model only: what a step does outside of it cannot become a region.

    Calls after the first of backward keep their names: a second forward is known by them.
    """
    paths = set(by_name(find_targets(model)))
    if paths.issuperset(entry.path for entry in profile.modules):
        return profile
    last = profile.forward_count
    calls = [
        call if number >= last or call.module in paths else replace(call, module="")
        for number, call in enumerate(profile.calls)
    ]
    entries = (entry for entry in profile.modules if entry.path in paths)
    return replace(profile, calls=tuple(calls), modules=tuple(entries))
