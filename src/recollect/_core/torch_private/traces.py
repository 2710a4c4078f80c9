"""What Python frames are: calls of modules, and, in a traceback, the backward pass that raised, its graph and node.

Private names: the locals of ``torch.autograd.graph._engine_run_backward``, ``BackwardCFunction.apply`` as the frame
under which the backward of a custom Function runs, ``nn.Module._call_impl``.
Would be replaced by: an error of autograd's engine that names the node.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import _getframe
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from recollect._core.torch_private.engine import ENGINE_CODE

_CALLS = nn.Module._call_impl.__code__
_FUNCTION_CODE = BackwardCFunction.apply.__code__


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPass:
    """A backward pass that has raised."""

    roots: tuple[Any, ...]
    """The nodes it started from."""
    keeps_graph: bool
    """Whether nodes that it has run still hold what they saved."""


def pass_of(frame: FrameType) -> FailedPass | None:
    """The backward pass that a frame has run; None if it has run none."""
    if frame.f_code is not ENGINE_CODE:
        return None
    found = frame.f_locals
    outputs = found.get("t_outputs") or ()
    nodes = tuple(t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None)
    options: tuple[Any, ...] = found.get("args") or ()
    return FailedPass(roots=nodes, keeps_graph=len(options) < 2 or bool(options[1]))  # noqa: PLR2004


def function_of(frame: FrameType) -> Any:
    """The node of a custom Function whose backward a frame runs; None for any other frame."""
    return frame.f_locals.get("self") if frame.f_code is _FUNCTION_CODE else None


def is_module_call(frame: FrameType) -> bool:
    """Whether a frame is that of a call of a module, in which its hooks and its forward run."""
    return frame.f_code is _CALLS


def running_module() -> nn.Module | None:
    """The innermost module whose call runs on this thread."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and not is_module_call(frame):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
