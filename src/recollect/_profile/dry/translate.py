"""What differs on CUDA, while a step runs on fake CPU tensors: kernels, results, workspaces, autocast, device names.

A context that puts `kernels` in the place of torch's for the CPU, gives results the dtypes they have on CUDA, lets
``device="cuda"`` and ``torch.autocast("cuda")`` in the user's code mean the fake tensors, and knows what operators take
beside their results. Assumptions go to `Translation.notes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recollect._core.operators import Operator
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.engine import current_pass
from recollect._core.torch_private.fake import (
    autocast_differs,
    autocast_for,
    constructors,
    is_fake,
    kernels,
    run_composite,
    without_autocast_on_cpu,
)
from recollect._profile.dry.kernels import Attention, batch_norm, dropout, rms_norm
from recollect._profile.dry.recurrent import BACKWARDS, RESERVES, recurrent_kernels
from recollect._profile.dry.roofline import Device, find_device
from recollect._profile.dry.workspaces import find_workspace

_HALVES = (torch.float16, torch.bfloat16)
_STATISTICS = frozenset(
    {
        *("aten.native_layer_norm.default", "aten.native_batch_norm.default", "aten.cudnn_batch_norm.default"),
        "aten._native_batch_norm_legit.default",
    }
)
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_addmm_activation"})


class Translation:
    """What is known of a step on CUDA beyond its storages.

    Attributes:
        fixed_bytes: workspaces of cuBLAS, which are kept: one for forward's thread, one for autograd's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.attention = Attention(device)
        self._products: set[tuple[bool, bool]] = set()
        self._notes: dict[str, None] = {}

    def note(self, sentence: str) -> None:
        """Something is assumed; said once."""
        self._notes[sentence] = None

    @property
    def fixed_bytes(self) -> int:
        """Workspaces of cuBLAS: of the threads that multiplied, and with a bias those of cuBLASLt."""
        is_large = self._device.capability >= (9, 0)
        each = 32 * 2**20 if is_large else 2 * 4096 * 1024 + 8 * 16 * 1024
        threads = {in_backward for in_backward, _ in self._products}
        return each * len(threads) + 2**20 * len({key for key in self._products if key[1]})

    @property
    def notes(self) -> list[str]:
        """What was assumed, in sentences."""
        source = "by rules that were measured on an H200 with torch 2.11"
        said = [f"kernels, workspaces and rounding are those of {self._device.name}, {source}"]
        if self.attention.chosen:
            said.append(f"scaled_dot_product_attention runs as {', '.join(sorted(self.attention.chosen))}")
        return [*said, *self._notes]

    def workspace_bytes(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Bytes that an operator takes and gives back while it runs."""
        name = operator.name
        if name.startswith("aten.") and name.split(".")[1] in _PRODUCTS:
            self._products.add((current_pass() != -1, name.startswith("aten.addmm")))
        workspace = find_workspace(name)
        return 0 if workspace is None else workspace(self._device, args, result)


def workspaces_on(device: torch.device) -> Translation | None:
    """What operators take beside their results on a device that is here, for real steps; None where nobody knows."""
    if device.type != "cuda":
        return None
    try:
        return Translation(find_device(device))
    except ValueError:
        return None


@contextmanager
def translated(device: Device) -> Generator[Translation]:
    """Let fake CPU tensors be used as CUDA would use its own; to be entered inside of the fake mode.

    Kernels are replaced in the whole process; on real tensors and on other threads' autocast they do as before, except
    that CPU autocast casts the operators that CUDA's would.
    """
    translation = Translation(device)
    with ExitStack() as stack:
        stack.enter_context(kernels(_kernel_table(translation)))
        stack.enter_context(autocast_for("cuda", as_if="cpu"))
        stack.enter_context(_Results(translation))
        stack.enter_context(_Devices(translation))
        yield translation


def _kernel_table(translation: Translation) -> dict[tuple[str, str], Callable[..., Any]]:
    table: dict[tuple[str, str], Callable[..., Any]] = {}
    composed: dict[str, Callable[..., Any]] = {
        "dropout": dropout,
        "rms_norm": rms_norm,
        "_batch_norm_impl_index": batch_norm,
        **recurrent_kernels(),
    }
    for name, kernel in composed.items():
        compose = functools.partial(_compose, name)
        table[name, "AutogradCPU"] = _on_fakes(functools.partial(kernel, compose), compose)
    name = "scaled_dot_product_attention"
    table[name, "AutogradCPU"] = _on_fakes(translation.attention, functools.partial(_compose, name))
    return table | _autocast_table()


def _compose(name: str, *args: Any, **kwargs: Any) -> Any:
    return run_composite(name, args, kwargs)


def _on_fakes(kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (kernel if is_fake(args[0]) else otherwise)(*args, **kwargs)

    return choose


# Results.


class _Results(DispatchMode):
    """Gives results as CUDA does: statistics of norms in float32, the memory that recurrent nets reserve."""

    def __init__(self, translation: Translation) -> None:
        super().__init__()
        self._note = translation.note

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator."""
        name = str(func)
        backward = BACKWARDS.get(name)
        if backward is not None:
            return backward(args)
        result = func(*args, **kwargs)
        if name in _STATISTICS and args[0].dtype in _HALVES:
            return (result[0], *(_in_float32(part) for part in result[1:3]), *result[3:])
        reserve = RESERVES.get(name)
        if reserve is None:
            return result
        self._note("what cuDNN reserves for the backward of recurrent nets is a rough guess")
        return reserve(args, result)


def _in_float32(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.float32)


# Devices in the user's code.


class _Devices(TorchFunctionMode):
    """Lets what the user's code says of CUDA mean the CPU, where the fake tensors are."""

    is_transparent = True

    def __init__(self, translation: Translation) -> None:
        super().__init__()
        self._note = translation.note
        self._constructors = constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with other devices."""
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if "device" in kwargs or func in self._constructors:
            kwargs["device"] = _on_cpu(kwargs.get("device"))
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cpu or (func is Tensor.to and args[1:2] == ("cpu",)):
            self._note("what the step copies to the host is counted on the device for as long as it is alive")
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], (Tensor, torch.dtype)):
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    if device is None or isinstance(device, int):  # a number is one of the devices that are not there
        return torch.device("cpu")
    return torch.device("cpu") if torch.device(device).type == "cuda" else device


# Autocast. The lists are those of torch's documentation, "CUDA Ops that can autocast to float16 / float32".

_TO_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d"),
    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
_IN_FLOAT32 = {  # with where the dtype stands, if it stands among the positional arguments
    "softmax.int": 2,
    "log_softmax.int": 2,
    "cumprod": None,
    "cumsum": None,
    "sum": None,
    "sum.dim_IntList": None,
    "linalg_vector_norm": None,
    "linalg_matrix_norm": None,
}
_PROMOTED = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot", "scatter_add")
_TO_LOWER = ("addmv", "addr", "mv", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_KEY = "AutocastCPU"


def _autocast_table() -> dict[tuple[str, str], Callable[..., Any]]:
    table: dict[tuple[str, str], Callable[..., Any]] = {}
    for name in autocast_differs():
        table[name, _KEY] = torch.library.fallthrough_kernel
    for name in _TO_FLOAT32:
        table[name, _KEY] = functools.partial(_cast, name, lambda _: torch.float32)
    for name in _PROMOTED:
        table[name, _KEY] = functools.partial(_cast, name, _widest)
    for name in _TO_LOWER:
        table[name, _KEY] = functools.partial(_cast, name, lambda _: torch.get_autocast_dtype("cpu"))
    for name, at in _IN_FLOAT32.items():
        table[name, _KEY] = functools.partial(_give_dtype, name, at)
    return table


def _function(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast(name: str, choose: Callable[[list[torch.dtype]], torch.dtype], *args: Any, **kwargs: Any) -> Any:
    with without_autocast_on_cpu():
        found = [a.dtype for part in args for a in (part if isinstance(part, (list, tuple)) else (part,)) if _casts(a)]
        if found:
            dtype = choose(found)
            args = tuple(_to(part, dtype) for part in args)
            kwargs = {key: _to(part, dtype) for key, part in kwargs.items()}
        return _function(name)(*args, **kwargs)


def _casts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_to(part, dtype) for part in value]
    return value.to(dtype) if _casts(value) else value


def _widest(found: list[torch.dtype]) -> torch.dtype:
    return torch.float32 if torch.float32 in found else found[0]


def _give_dtype(name: str, at: int | None, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("dtype") if at is None or len(args) <= at else args[at]
    with without_autocast_on_cpu():
        if given is None and args[0].dtype in _HALVES:
            return _function(name)(*args[:at], **{**kwargs, "dtype": torch.float32})
        return _function(name)(*args, **kwargs)
