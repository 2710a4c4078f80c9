"""Runs the step that is to fit, plain or under a plan, and leaves everything as it was."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from recollect._apply.targets import by_name, find_targets
from recollect._core.profiles import Profile
from recollect._fit.batches import Call
from recollect._inspect.profile import profile_step

_log = logging.getLogger("recollect")


class Runner:
    """Profiles one call of a model, or of a step that works with it.

    Args:
        model: whose modules may become regions.
        call: what is run.
        optimizer: whose state and step are counted.
        progress: called now and then with a number of things done and of things to do, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
        progress: Callable[[int, int | None], None] | None,
    ) -> None:
        self._model, self._call = model, call
        self._optimizer, self._progress = optimizer, progress

    def profile_plainly(self) -> Profile:
        """The plain step: a real one if there is room for it, else one on fake tensors."""
        try:
            return self._profile()
        except torch.OutOfMemoryError:
            _log.info("recollect.fit: the plain step does not fit; it is profiled on fake tensors")
        except (TypeError, AttributeError) as error:
            if self._call.doubt:
                error.add_note(self._call.doubt)
            raise
        gc.collect()
        torch.cuda.empty_cache()
        return self._profile(dry=True)

    def measure(self) -> tuple[int | None, float | None]:
        """The peak and the time of a step as it is now; no peak if memory ran out."""
        gc.collect()
        try:
            seen = self._profile()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None, None
        peak = max([seen.peak_bytes, *(entry.peak_bytes for entry in seen.allocators[:1])])
        return peak, seen.step_s

    def _profile(self, *, dry: bool = False) -> Profile:
        call = self._call
        seen = profile_step(
            call.function,
            call.args,
            dict(call.kwargs),
            model=self._model,
            loss=call.loss,
            optimizer=self._optimizer,
            dry=dry,
            name=type(self._model).__name__,
            progress=self._progress,
        )
        return seen if call.function is self._model else keep_within(seen, self._model)


def keep_within(profile: Profile, model: nn.Module) -> Profile:
    """The profile with modules of this model only: what a step does outside of it cannot become a region.

    Calls after the first of backward keep their names: a second forward is refused by them.
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
