"""The base class for modes that see every operator, in forward, in recomputation and on autograd's threads.

Private names: `torch.utils._python_dispatch.TorchDispatchMode`, and two of its class methods, overridden below; the
guard by which an alias made inside a mode shares its version counter; which modes are on; whether hooks are set for
all modules.
Replaced by: a public dispatch mode, once torch exports one (`torch.overrides.TorchFunctionMode` is not a substitute: it
does not see the operators of backward).
Run on: torch 2.11 (CUDA), 2.13 (CPU).
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

from torch import _C, Tensor, ops
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from recollect._core.torch_private.compiler import untraced

__all__ = [
    "FAKES",
    "DispatchMode",
    "alias_with_version",
    "dispatch_mode_depth",
    "fake_class",
    "is_watched",
    "quick_alias",
    "without_dispatch_modes",
]

_exclude = _C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = _C._dispatch_tls_is_dispatch_key_excluded
_VERSIONED = _C.DispatchKey.ADInplaceOrView
_DEVICE = ops.prim.device.default
FAKES = "torch._subclasses.fake_tensor"
"""The module of tensors without memory, which is not imported for their sake."""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that leaves Dynamo alone: importing nothing of it, and out of the way of compiled code.

    Subclasses override `meet`, which runs with the mode itself switched off, holds the GIL, and may be called by
    several of autograd's threads at once. Higher-order operators arrive there too, as one call each.

    Attributes:
        looks_beneath: whether operators on tensors that wrap others are met as what they do to those; for subclasses
            to set.
        is_on_wrappers: whether the operator just met has such tensors among its arguments; of use where one thread
            runs under the mode.
        steps_aside: whether it is off while compiled code runs (`compiled_calls.py`); for subclasses to set.
    """

    supports_higher_order_operators = True
    looks_beneath = False
    is_on_wrappers = False
    steps_aside = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Left on, the first operator under the mode imports all of torch._dynamo (about 2 s); `untraced` does the same.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled functions compiled under the mode; only what they call as operators at run time is seen."""
        return True

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]

    @property
    def is_on(self) -> bool:
        """Whether the mode meets the operators of this thread: that it was entered on, or one of autograd's for it."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    @untraced  # between compiled frames, Dynamo would be for compiling this, too
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let the subclass meet the operator."""
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # asked by all that reads where a fake tensor is: five times for each operator of a dry step
        if self.looks_beneath and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper takes itself apart, and its inner operators come here
        self.is_on_wrappers = bool(types)
        return self.meet(func, args, kwargs or {})

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator is called: run it."""
        return func(*args, **kwargs)


dispatch_mode_depth: Callable[[], int] = _C._len_torch_dispatch_stack
"""How many dispatch modes are on. Costs 50 ns."""


def without_dispatch_modes() -> AbstractContextManager[object]:
    """A context in which no dispatch mode of anybody sees an operator."""
    return _disable_current_modes() if _C._len_torch_dispatch_stack() else nullcontext()


def alias_with_version(tensor: Tensor) -> Tensor:
    """Another tensor on the same memory that sees writes into it by its version; to be called inside a mode."""
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003
        return tensor.detach()


def quick_alias(tensor: Tensor) -> Tensor:
    """The same at less cost: saves 1 µs."""
    if not _is_excluded(_VERSIONED):
        return tensor.detach()
    _exclude(_VERSIONED, False)  # noqa: FBT003
    try:
        return tensor.detach()
    finally:
        _exclude(_VERSIONED, True)  # noqa: FBT003


def fake_class() -> type[Tensor] | None:
    """The class of tensors while a mode is on that makes them fake; None while there is none."""
    if not _C._len_torch_dispatch_stack():
        return None
    is_on = any(type(mode).__module__ == FAKES for mode in _get_current_dispatch_mode_stack())
    return sys.modules[FAKES].FakeTensor if is_on else None


def is_watched() -> bool:
    """Whether somebody may call torch between a region's own calls: hooks on all modules, or one of torch's tracers.

    Another dispatch mode, such as a meter of memory, runs inside of calls, where those who follow calls do not see it.
    """
    if _C._len_torch_dispatch_stack() and any(
        getattr(mode, "_mode_key", None) is not None and type(mode).__module__ != FAKES
        for mode in _get_current_dispatch_mode_stack()
    ):
        return True
    return bool(_module._global_forward_hooks or _module._global_forward_pre_hooks)
