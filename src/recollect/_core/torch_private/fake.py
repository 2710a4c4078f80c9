"""Fake tensors: shapes, dtypes and storages without memory; and kernels of ours in place of torch's while they run.

Private names: ``torch._subclasses.fake_tensor``, operators of CUDA that are called on fake tensors, the tables in
which modules keep parameters and buffers, the guards that keep autograd and autocast out of a call, the end of a
``torch.library.Library``, what is known of autocast's kernels, and how ``torch.autocast`` is entered.
Would be replaced by: a public fake-tensor mode; a public context for kernels; autocast for devices that are not there.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy

_C = torch._C
_aten = torch.ops.aten

ATTENTION_BY_CUDNN = _aten._scaled_dot_product_cudnn_attention
ATTENTION_BY_FLASH = _aten._scaled_dot_product_flash_attention
ATTENTION_EFFICIENT = _aten._scaled_dot_product_efficient_attention
ATTENTION_COMPOSED = _aten._scaled_dot_product_attention_math
RMS_NORM_FUSED = _aten._fused_rms_norm
RMS_NORM_FUSED_BACKWARD = _aten._fused_rms_norm_backward
RECURRENT_BY_CUDNN = _aten._cudnn_rnn
READ_SCALAR = _aten._local_scalar_dense.default

Kernel = Callable[..., Any]
DATA_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where the values of a fake tensor are asked for."""
UNKNOWN_ERRORS = (UnsupportedFakeTensorException, UnsupportedOperatorException)
"""Raised where an operator, or a kind of tensor, has no fake one."""


def fake_mode() -> FakeTensorMode:
    """A mode in which operators compute shapes only. Real tensors that meet it are taken as fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def without_log() -> Generator[None]:
    """Let torch not log, with all frames, what it raises anyway where an operator refuses fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def formatted_as_numbers() -> Generator[None]:
    """Let fake tensors without dimensions be written as the number that they are asked for, as real ones are."""

    def write(tensor: Tensor, spec: str) -> str:
        return format(tensor.item(), spec) if not tensor.dim() else object.__format__(tensor, spec)

    FakeTensor.__format__ = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__format__


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no memory behind it."""
    return isinstance(tensor, FakeTensor)


def operator_in(error: BaseException) -> str:
    """The operator that an error of fake tensors is about."""
    func = getattr(error, "func", None)
    return str(func) if func is not None else ""


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where a module keeps its own parameters and buffers."""
    return module._parameters, module._buffers


def is_uninitialized(tensor: Tensor) -> bool:
    """Whether a lazy module has yet to give it a shape."""
    return bool(is_lazy(tensor))


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory, those on ``meta`` included."""
    key: int = tensor.untyped_storage()._cdata
    return key


def below_autograd() -> AbstractContextManager[None]:
    """A context in which operators go past autograd, as within its own kernels."""
    guard: AbstractContextManager[None] = _C._AutoDispatchBelowAutograd()
    return guard


def without_autocast_on_cpu() -> AbstractContextManager[None]:
    """A context in which autocast for the CPU changes nothing, as within its own kernels."""
    guard: AbstractContextManager[None] = _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.AutocastCPU))
    return guard


def autocast_differs() -> tuple[str, ...]:
    """Operators, with their overloads, that autocast for the CPU changes and autocast for CUDA does not."""
    names = [name for name in _C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has = _C._dispatch_has_kernel_for_dispatch_key
    found = [name for name in names if has(name, "AutocastCPU") and not has(name, "AutocastCUDA")]
    return tuple(name.removeprefix("aten::") for name in found)


@contextmanager
def kernels(table: Mapping[tuple[str, str], Kernel]) -> Generator[None]:
    """Put kernels of ours in place of torch's, by operator (of aten) and dispatch key.

    They are there for the whole process until the context is left, so that a kernel has to look whether it is meant.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced is meant
            for (name, key), kernel in table.items():
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def run_composite(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator of aten as if nobody had put a kernel in its place: by what it is composed of."""
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return func._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def autocast_for(device: str, *, as_if: str) -> Generator[None]:
    """Let this thread's ``torch.autocast(device)`` be one for another device, also where it is on already."""
    thread = get_ident()
    kind: Any = torch.autocast
    made, entered, left = kind.__init__, kind.__enter__, kind.__exit__
    stand_ins: dict[int, list[Any]] = {}

    def make(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:  # noqa: FBT001, FBT002
        if device_type == device and get_ident() == thread:
            device_type, dtype = as_if, dtype or torch.get_autocast_dtype(device)
        made(self, device_type, dtype, enabled, cache_enabled)

    def enter(self: Any) -> Any:
        if self.device != device or get_ident() != thread:
            return entered(self)
        stand_in = torch.autocast(
            as_if, dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
        )
        stand_ins.setdefault(id(self), []).append(stand_in)
        entered(stand_in)
        return self

    def leave(self: Any, *error: Any) -> Any:
        waiting = stand_ins.get(id(self)) if get_ident() == thread else None
        return left(waiting.pop() if waiting else self, *error)

    is_on = torch.is_autocast_enabled(device)
    kind.__init__, kind.__enter__, kind.__exit__ = make, enter, leave
    try:
        if is_on:
            with torch.autocast(as_if, dtype=torch.get_autocast_dtype(device)):
                yield
        else:
            yield
    finally:
        kind.__init__, kind.__enter__, kind.__exit__ = made, entered, left


def constructors() -> frozenset[Callable[..., Any]]:
    """The functions of torch that make a tensor on a device that is current."""
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())
