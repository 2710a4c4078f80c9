"""How optimizers step while a step is profiled: for real, on fake tensors beside the step, or not at all.

On a device they step on fakes: copying what they write to the host, to put it back, takes longer than the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from recollect._core.calls import Category
from recollect._core.units import format_bytes
from recollect._inspect.roots import named_parameters, named_states
from recollect._profile.assemble import Known
from recollect._profile.capture import Capture
from recollect._profile.storage_log import BEFORE

if TYPE_CHECKING:
    # Not at import: fake tensors bring much of torch along.
    from recollect._profile.optimizer import OptimizerLike, Shadow


class OptimizerSteps:
    """The steps of optimizers in one capture.

    Args:
        capture: is told of steps on fakes, and sees the others itself.
        known: is told which memory is an optimizer's.
        modules: whose parameters they change.
        optimizers: of the step.
        kind: one to let step on fakes, if none stepped.
        is_cuda: whether parameters are, or stand for, those of a CUDA device.
        is_dry: whether the whole step runs on fakes.

    Attributes:
        names: of the classes that stepped on fakes.
        notes: what a reader of the profile has to know of them.
    """

    def __init__(
        self,
        capture: Capture,
        known: Known,
        *,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kind: OptimizerLike | None,
        is_cuda: bool,
        is_dry: bool,
    ) -> None:
        self._capture, self._known = capture, known
        self._modules, self._optimizers, self._kind = modules, optimizers, kind
        self._is_cuda, self._is_dry = is_cuda, is_dry
        self._shadows: list[Shadow] = []
        self.names: list[str] = []
        self.notes: list[str] = []

    def begin_shadowing(self) -> ExitStack:
        """Let the optimizers step on fakes, until what this gives is closed."""
        from recollect._profile.optimizer import with_shadow_steps

        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(with_shadow_steps(optimizer, self._follow, on_cuda=True))
            return stack.pop_all()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Let the optimizers not step."""
        from recollect._profile.optimizer import without_steps

        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(without_steps(optimizer))
            yield

    def count_new_states(self) -> None:
        """Count what optimizers made for themselves in this step, their first, as if it had been there: later it is."""
        for name, state in named_states(self._optimizers, self._modules):
            self._known.add(self._capture.storages.count_from_start(state), Category.OPTIMIZER, name)

    def step_if_none_did(self) -> None:
        """Let the given optimizer step, if none did: its state counts from before the step, its calls come last."""
        if self._capture.optimizers or self.names:
            return
        if self._kind is None:
            self.notes.append("no optimizer was given, so neither its state nor its step is counted")
            return
        from recollect._profile.optimizer import shadow_of

        named = list(named_parameters(self._modules))
        with shadow_of(self._kind, [parameter for _, parameter in named], on_cuda=self._is_cuda) as shadow:
            self._follow(shadow)
            stepped = {id(parameter) for _, parameter in shadow.known}
        unused = [
            (name, parameter)
            for name, parameter in named
            if parameter.requires_grad and parameter.grad is None and id(parameter) in stepped
        ]
        if unused and shadow.states:
            size = format_bytes(sum(parameter.nbytes for _, parameter in unused))
            self.notes.append(
                f"{len(unused)} of {len(named)} parameters, {size}, got no gradient in this step (the first is "
                f"{unused[0][0]}): the state of {shadow.name} for them is counted, because later steps may use them"
            )

    def _follow(self, shadow: Shadow) -> None:
        """Let an optimizer's shadow step, whose state was there before and stays."""
        capture = self._capture
        self._shadows.append(shadow)
        for fake, real in shadow.pairs():
            for number in capture.include(real):
                capture.storages.alias(fake.untyped_storage(), number)
        for state in shadow.states:
            number = capture.storages.number(state.untyped_storage(), state.device, BEFORE, is_given=True)
            self._known.add([number], Category.OPTIMIZER, "")
        with capture.following() as watch:
            shadow.step(watch)
        self.names.append(shadow.name)
        self.notes += shadow.notes
        if not self._is_dry and not shadow.notes:
            self.notes.append(f"the step of {shadow.name} was not run: its memory and time are estimated")
