"""`nn.Module` from within: which call a hook belongs to, and who walks over modules.

A hook is told the module and its arguments, but not which call it is of, nor whether ``forward`` has raised; Python's
stack says both. In the same way a module that is asked for its ``named_modules`` learns whether parameters and buffers
are being listed.

A module that is converted (``.to(dtype)``, in the forward of routers of Transformers) swaps its tensors even if they
are as asked for, which fake ones do not allow.

Private names: ``nn.Module._call_impl``, ``nn.Module._named_members``, ``nn.Module._apply``; the tables of hooks on all
modules.
Would be replaced by: forward hooks that are given a token of their call, and called when anything at all was raised;
a method by which a module names its members; conversions that leave alone what is as asked for; a list of global hooks.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import PurePath
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

_CALLS = nn.Module._call_impl.__code__
_LISTS = nn.Module._named_members.__code__
_WALKS = nn.Module.named_modules.__code__
_EXPORTERS = tuple(str(PurePath(torch.__file__).parent / part) for part in ("export", "_export"))


def call_of_hook(caller: FrameType) -> FrameType:
    """The call of a module that runs a hook, by the Python frame that called the hook: one object for all its hooks."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is not _CALLS:
        frame = frame.f_back
    return caller if frame is None else frame


def is_after_exception(caller: FrameType) -> bool:
    """Whether a forward hook is called because the call has raised; ``sys.exception()`` is then what it raised."""
    return caller.f_code is _CALLS


def is_running(call: FrameType) -> bool:
    """Whether this thread is inside a call, given by `call_of_hook`. Looks up the stack as far as that call."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def global_hook_tables() -> list[tuple[dict[int, Any], ...]]:
    """The tables of forward hooks and pre-hooks on all modules, each with those that say how some are called."""
    return [
        (
            _module._global_forward_hooks,
            _module._global_forward_hooks_with_kwargs,
            _module._global_forward_hooks_always_called,
        ),
        (_module._global_forward_pre_hooks,),
    ]


@contextmanager
def needless_conversions_left_out(is_meant: Callable[[Tensor], bool]) -> Generator[None]:
    """Inside, modules that hold such tensors, and are converted to what they are already, stay as they are.

    The method is replaced in the whole process; modules that hold none are converted as ever.
    """
    convert: Callable[..., nn.Module] = nn.Module._apply

    def convert_if_needed(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002
        tensors: list[Tensor] = [*module.parameters(recurse), *module.buffers(recurse)]
        if any(map(is_meant, tensors)):
            with torch.no_grad():
                if all(fn(tensor) is tensor for tensor in tensors):
                    return module
        return convert(module, fn, recurse)

    nn.Module._apply = convert_if_needed  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


def lists_members() -> bool:
    """Within a module's ``named_modules``: whether it is walked to list parameters or buffers. No while compiling."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    walker = _getframe(1)
    frame: FrameType | None = walker
    while frame is not None and (frame.f_code is _WALKS or frame.f_code is walker.f_code):
        frame = frame.f_back
    if frame is None or frame.f_code is not _LISTS:
        return False
    # Export finds modules by the names of their parameters, wherever it lists them.
    while frame is not None and not frame.f_code.co_filename.startswith(_EXPORTERS):
        frame = frame.f_back
    return frame is None
