"""What recollect is measured against, each set up the way its own documentation does it, or in its style."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

Call = Callable[..., Any]
"""`call(function, *args, **kwargs)` runs the function as one region."""

_aten = torch.ops.aten
SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001 (names of operators)
    _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
    _aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
)
"""What torchtitan's selective checkpointing keeps, every second product excepted; and convolutions, for images."""
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


def call_torch(function: Call, *args: Any, **kwargs: Any) -> Any:
    """Torch's checkpoint."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def call_reentrant(function: Call, *args: Any) -> Any:
    """Torch's older checkpoint, which runs a backward inside backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)


def call_selective(function: Call, *args: Any, **kwargs: Any) -> Any:
    """Torch's selective checkpoint with torchtitan's list: every second product is computed again."""
    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_make_selective_contexts, **kwargs
    )


def _make_selective_contexts() -> Any:
    seen = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
        del args, kwargs
        is_kept = op in SAVED_OPS
        if op in _PRODUCTS:
            seen[context.is_recompute] += 1
            is_kept = seen[context.is_recompute] % 2 == 1
        policy = torch_checkpoint.CheckpointPolicy
        return policy.MUST_SAVE if is_kept else policy.PREFER_RECOMPUTE

    return torch_checkpoint.create_selective_checkpoint_contexts(decide)


def find_package(name: str) -> ModuleType | None:
    """A package of a rival; None if it is not installed, or does not load here."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def call_remat(remat: ModuleType, device: torch.device) -> Call:
    """torch_remat with the checks and the random state that the other engines keep."""
    hooks = (_RandomState(device),)

    def call(function: Call, *args: Any, **kwargs: Any) -> Any:
        wrap = remat.checkpoint(determinism_check="default", recompute_state_hooks=hooks)
        return wrap(function)(*args, **kwargs)

    return call


class _RandomState:
    """torch_remat leaves random state to its user; this keeps what the other engines keep, CPU and device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def snapshot(self) -> tuple[Tensor, Tensor | None]:
        """The state before forward."""
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def restore(self, state: tuple[Tensor, Tensor | None]) -> None:
        """The same state again."""
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)


class _Block(nn.Module):
    """A block as xformers' wrapper takes it, with the forward that it had."""

    def __init__(self, forward: Call) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives."""
        return self._forward(*args, **kwargs)


def plan_by_xformers(xformers: ModuleType, share: float) -> Callable[[Call], Call]:
    """The planner of xformers: each block solves in its first call what to keep, within a share of its memory."""

    def wrap(forward: Call) -> Call:
        planned = xformers.selective_checkpoint_wrapper(_Block(forward), memory_budget=share)
        return lambda *args, **kwargs: planned(*args, **kwargs)

    return wrap


class TrlOffloader:
    """TRL's own offloader, as its trainers set it up for a model: all but the head."""

    def __init__(self, trl: ModuleType) -> None:
        self._make = trl.get_act_offloading_ctx_manager
        self._context: AbstractContextManager[Any] = nullcontext()

    def prepare(self, model: nn.Module) -> None:
        """Take the model that is going to run."""
        self._context = self._make(model)

    def around(self) -> AbstractContextManager[Any]:
        """What forward runs in."""
        return self._context


class StashingOffloader(saved_tensors_hooks):
    """In the style of TRL's and torchtune's, from their description.

    Out on a stream of its own, into pinned memory allocated for each tensor; the last few stay until their copies are
    done. Back on the same stream, when backward asks.
    """

    def __init__(self, min_bytes: int = 1024, stash: int = 5) -> None:
        self._stream = torch.cuda.Stream()
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._stash, self._min = stash, min_bytes
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base  # noqa: SLF001 (public in all but name)
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)
        if tensor.numel() * tensor.itemsize < self._min or is_parameter or not tensor.is_cuda:
            return tensor
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            there.copy_(tensor, non_blocking=True)
        self._leaving.append((tensor, self._stream.record_event()))
        while len(self._leaving) > self._stash:
            _, done = self._leaving.popleft()
            torch.cuda.current_stream().wait_event(done)
        return there, tensor.device

    def _unpack(self, packed: Any) -> Tensor:
        self._leaving.clear()
        if isinstance(packed, Tensor):
            return packed
        there, device = packed
        with torch.cuda.stream(self._stream):
            here: Tensor = there.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
        here.record_stream(torch.cuda.current_stream())
        return here
