"""Where in the step and in the user's code a call stands: its phase, region, module and line.

Whoever asks stands two frames below the operator, as `Capture.meet` does: the Python stack is read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recollect._core.calls import Phase
from recollect._core.families import paths_above
from recollect._core.places import (
    Places,
    assigns_to_part,
    calling_instruction,
    is_recomputed_by_torch,
    uses_torchscript,
)
from recollect._core.scope import current_run
from recollect._core.torch_private.engine import current_pass, sequence_of
from recollect._core.torch_private.graph import leaf_of
from recollect._profile.raw import RawCall
from recollect._profile.scopes import Scopes
from recollect._profile.visits import Visits


class Whereabouts:
    """Tells of one step where its calls stand.

    Args:
        region_of: the name of the region that runs here; ``""`` for none.
        replay_of: where a value is made again without running the user's code: the region, and the line it is of.

    Attributes:
        places: the modules met so far, by path.
        scopes: the names that the user gave.
        visits: which modules are called; to be started and stopped.
        saw_torch_checkpoint: whether ``torch.utils.checkpoint`` recomputed something.
    """

    def __init__(self, *, region_of: Callable[[], str], replay_of: Callable[[], tuple[str, str] | None]) -> None:
        self.places, self.scopes = Places(), Scopes()
        self.saw_torch_checkpoint = False
        self._region_of, self._replay_of = region_of, replay_of
        self._stepping: list[int] = []  # the backward pass, -1 for none, in which an optimizer began to step
        self._caller: object = None  # of the last operator in forward: its module, and the instruction
        self._within, self._is_scripted, self._is_assignment = -1, False, False
        self.visits = Visits()
        self._last_module: str | None = None  # of the last operator in forward
        self._saw_regions = False

    def begin_optimizer(self) -> None:
        """What is called from now on with grad mode off, in this backward pass or outside of any, is an optimizer's."""
        self._stepping.append(current_pass())

    def end_optimizer(self) -> None:
        """It has made its step."""
        if self._stepping:
            self._stepping.pop()

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """What is called inside with grad mode off is an optimizer's."""
        self.begin_optimizer()
        try:
            yield
        finally:
            self.end_optimizer()

    def place(self, call: RawCall, sequence: int, node: Any) -> Tensor | None:
        """Write into a call where it stands.

        Args:
            call: that was just made.
            sequence: of the last node that autograd made in forward.
            node: of the graph that runs; None outside of backward.

        Returns:
            The leaf that backward has come to; None anywhere else.
        """
        call.run, call.scopes, call.leaf = current_run(), self.scopes.now(), -1
        call.module = call.source = ""
        call.within, call.entered, call.is_scripted, call.is_assignment = None, None, False, False
        call.region = region = self._region_of()
        if region:
            self._saw_regions = True
        if call.run is not None:
            call.phase, call.sequence = Phase.RECOMPUTATION, -1
        elif self._stepping and self._stepping[-1] == current_pass() and not torch.is_grad_enabled():
            call.phase, call.sequence = Phase.OPTIMIZER, -1
        elif node is not None:
            replayed = self._replay_of() if self._saw_regions else None
            if replayed is not None:
                call.phase, call.sequence = Phase.RECOMPUTATION, -1
                call.region, call.source = replayed
                return None
            if torch.is_grad_enabled() and is_recomputed_by_torch(3):
                self.saw_torch_checkpoint = True
                call.phase, call.sequence = Phase.RECOMPUTATION, -1
                call.module, call.source = self.places.locate(3)
                return None
            call.phase = Phase.BACKWARD
            leaf = leaf_of(node)
            call.sequence = sequence_of(node) if leaf is None else -1
            return leaf
        else:
            call.phase, call.sequence = Phase.FORWARD, sequence
        call.module, call.source = self.places.locate(3)
        if call.phase is Phase.FORWARD:
            caller = (call.module, *calling_instruction(3))
            if caller != self._caller:
                self._caller, self._within = caller, self._within + 1
                self._is_scripted, self._is_assignment = uses_torchscript(3), assigns_to_part(3)
            call.within = self._within
            call.is_scripted, call.is_assignment = self._is_scripted, self._is_assignment
            call.entered = self._find_entered(call.module)
            self._last_module = call.module
        return None

    def _find_entered(self, module: str) -> str | None:
        """The outermost module that was called anew since the last operator, if it makes that one and this one."""
        entered, before = self.visits.take(), self._last_module
        if before is None or not entered:
            return None
        around = set(paths_above(module)).intersection(paths_above(before))
        visited = (self.places.path_of(number) for number in entered)
        return next((path for path in visited if path in around), None)
