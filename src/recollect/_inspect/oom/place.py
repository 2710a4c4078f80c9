"""Where memory ran out: read off the traceback."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any

from torch.optim import Optimizer

from recollect._core.authors import Role, is_of_user, role_of
from recollect._core.calls import Phase
from recollect._core.torch_private.engine import sequence_of
from recollect._core.torch_private.graph import read_node, walk
from recollect._core.torch_private.traces import FailedPass, function_of, is_module_call, pass_of
from recollect._profile.tracks import format_line

_MOST_LINES = 4
_OPTIMIZERS = str(PurePath(inspect.getfile(Optimizer)).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPlace:
    """Where an exception was raised."""

    phase: Phase
    line: str
    """The innermost line of the user's code."""
    stack: tuple[str, ...]
    """Lines of the user's code, innermost first: ``model.py:41 in Block.forward``."""
    node: Any
    """In backward: the node that ran, as far as it can be told. Keeps its graph alive: not to be kept."""
    is_exact: bool
    """Whether that is certain; else it is the last node that was not freed."""


def find_place(trace: TracebackType | None) -> ErrorPlace:
    """Where the exception of a traceback was raised. Reads no variable of the user's frames."""
    phase, node = Phase.FORWARD, None
    failed: FailedPass | None = None
    lines: list[str] = []
    for frame, number in traceback.walk_tb(trace):
        failed = pass_of(frame) or failed
        node = function_of(frame) or node
        phase = _phase(frame, phase)
        code = frame.f_code
        if is_of_user(code, frame.f_globals):
            lines.append(f"{format_line(code.co_filename, number)} in {code.co_qualname}")
    is_exact = node is not None
    if phase is Phase.BACKWARD and node is None and failed is not None:
        node = _last_unfreed(failed)
    stack = tuple(reversed(lines[-_MOST_LINES:]))
    return ErrorPlace(
        phase=phase,
        line=stack[0].partition(" in ")[0] if stack else "",
        stack=stack,
        node=node if phase is Phase.BACKWARD else None,
        is_exact=is_exact,
    )


def _phase(frame: FrameType, phase: Phase) -> Phase:
    """The phase of what a frame calls, by the phase it is called in itself."""
    if pass_of(frame) is not None:
        return Phase.BACKWARD
    is_in_backward = phase in (Phase.BACKWARD, Phase.RECOMPUTATION)
    if is_module_call(frame):
        return Phase.RECOMPUTATION if is_in_backward else Phase.FORWARD
    file = frame.f_code.co_filename
    if is_in_backward:
        return Phase.RECOMPUTATION if role_of(frame) is Role.REGION else phase
    if frame.f_code.co_name == "step":
        is_optimizers = file.startswith(_OPTIMIZERS) or isinstance(frame.f_locals.get("self"), Optimizer)
        return Phase.OPTIMIZER if is_optimizers else phase
    return phase


def _last_unfreed(failed: FailedPass) -> Any:
    """The node at which a pass failed: passes run later nodes first, and free what a node saved when it has run.

    Where nodes save nothing, or several devices run theirs, it is one near that. None if the graph is kept.
    """
    if failed.keeps_graph:
        return None
    held = (node for node in walk(failed.roots) if read_node(node).held)
    return max(held, key=sequence_of, default=None)
