"""The kernels that torch would choose on CUDA, called on fake tensors: attention, dropout, norms, recurrent nets.

Each stands in for what is composed otherwise on the CPU, above autograd, so that what autograd saves is what it would
save there. Choices are those of torch 2.11 on an H200, where they were looked at, and follow torch's documented rules
on other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.fake import (
    ATTENTION_BY_CUDNN,
    ATTENTION_BY_FLASH,
    ATTENTION_COMPOSED,
    ATTENTION_EFFICIENT,
    RMS_NORM_FUSED,
    RMS_NORM_FUSED_BACKWARD,
    below_autograd,
)
from recollect._profile.dry.roofline import Device

_HALVES = (torch.float16, torch.bfloat16)
_AMPERE, _HOPPER = (8, 0), (9, 0)
_CUDNN_PREFERRED = ((9, 0), (10, 0))
_WIDEST_HEAD = 256
_ALIGNED = 8
aten = torch.ops.aten


class Attention:
    """Chooses and calls the kernel of ``scaled_dot_product_attention``.

    Attributes:
        chosen: names of the kernels that were.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.chosen: set[str] = set()

    def __call__(  # noqa: PLR0917 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What torch's function gives."""
        kernel = self.choose(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        self.chosen.add(kernel)
        if kernel == "math":
            result = ATTENTION_COMPOSED(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return result[0]  # type: ignore[no-any-return]
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal=is_causal, scale=scale)
        mask = _float_mask(attn_mask, query)
        if kernel == "cudnn":
            result = ATTENTION_BY_CUDNN(query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale)
            return result[0]  # type: ignore[no-any-return]
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
            needs_grad = needs_grad or mask.requires_grad
        result = ATTENTION_EFFICIENT(query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale)
        return result[0]  # type: ignore[no-any-return]

    def choose(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
    ) -> str:
        """Which kernel it would be: ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``."""
        order = ["flash", "efficient"]
        if self._device.capability in _CUDNN_PREFERRED:
            order.insert(0, "cudnn")
        # A mask counts, too: the position bias of T5 is a permuted view of an embedding, and gets no kernel of its own.
        is_masked_densely = mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1
        if is_masked_densely and all(t.dim() == 4 and t.stride(-1) == 1 for t in (query, key, value)):  # noqa: PLR2004
            for kernel in order:
                can = getattr(self, f"_can_{kernel}")
                if can(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa):
                    return kernel
        if not torch.backends.cuda.math_sdp_enabled():
            message = (
                "none of the enabled kernels (torch.nn.attention.sdpa_kernel) can run scaled_dot_product_attention "
                f"on query {query.dtype} {tuple(query.shape)} on {self._device.name}"
            )
            raise RuntimeError(message)
        return "math"

    def _can_cudnn(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
    ) -> bool:
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and query.dtype in _HALVES
            and query.shape[-1] <= _WIDEST_HEAD
            and not any(t.shape[-1] % _ALIGNED for t in (query, key, value))
            and not (mask is not None and (is_causal or mask.requires_grad))
            and _heads_agree(query, key, enable_gqa=enable_gqa)
        )

    def _can_flash(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
    ) -> bool:
        is_amd = self._device.capability == (0, 0)
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and (is_amd or self._device.capability >= _AMPERE)
            and query.dtype in _HALVES
            and mask is None
            and query.shape[-1] <= _WIDEST_HEAD
            and query.shape[-1] == key.shape[-1] == value.shape[-1]
            and not (is_causal and query.shape[-2] != key.shape[-2])
            and _heads_agree(query, key, enable_gqa=enable_gqa)
        )

    def _can_efficient(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, enable_gqa: bool
    ) -> bool:
        step = _ALIGNED if query.dtype in _HALVES else 4
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and query.dtype in (*_HALVES, torch.float32)
            and not (query.dtype is torch.bfloat16 and (0, 0) < self._device.capability < _AMPERE)
            and query.shape[1] == key.shape[1]
            and not any(t.shape[-1] % step for t in (query, key, value))
            and not (mask is not None and is_causal)
        )


def _heads_agree(query: Tensor, key: Tensor, *, enable_gqa: bool) -> bool:
    heads, groups = query.shape[1], key.shape[1]
    return heads == groups or (enable_gqa and heads % groups == 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *, is_causal: bool, scale: float | None) -> Tensor:
    head = q.shape[-1]
    missing = -head % _ALIGNED
    if missing:
        q, k, v = (torch.nn.functional.pad(t, (0, missing)) for t in (q, k, v))
    scale = scale if scale is not None else 1 / math.sqrt(head)
    result = ATTENTION_BY_FLASH(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return result[..., :head] if missing else result  # type: ignore[no-any-return]


def _float_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    low = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype)
    return torch.where(mask, torch.zeros((), dtype=query.dtype), low)


def dropout(compose: Callable[..., Any], x: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001 - torch's
    """Dropout with a mask of bools."""
    if train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]
    return compose(x, p, train)  # type: ignore[no-any-return]


class _FusedRMSNorm(torch.autograd.Function):
    """On the CPU torch composes it; as one operator it saves the input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
        with below_autograd():
            result, rstd = RMS_NORM_FUSED(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]]
        with below_autograd():
            of_x, of_weight = RMS_NORM_FUSED_BACKWARD(gradients[0], x, ctx.shape, rstd, weight, mask)
        return of_x, of_weight, None, None


def rms_norm(
    compose: Callable[..., Any], x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMSNorm by one kernel, where the dtypes agree."""
    if weight is not None and weight.dtype is not x.dtype:
        return compose(x, shape, weight, eps)  # type: ignore[no-any-return]
    normed: Tensor = _FusedRMSNorm.apply(x, weight, list(shape), eps)  # type: ignore[no-untyped-call]
    return normed


_CUDNN_LEAST_EPS = 1e-5
_CUDNN_LARGEST_BATCH = 880_801


def batch_norm(compose: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Batch norm by cuDNN, where it takes it: in training, with weights, and not in bfloat16."""
    weight, bias, mean, var, training, momentum, eps, cudnn_enabled = args
    if (
        cudnn_enabled
        and training
        and weight is not None
        and bias is not None
        and x.dtype in (torch.float16, torch.float32)
        and weight.dtype is torch.float32
        and x.shape[0] <= _CUDNN_LARGEST_BATCH
        and eps >= _CUDNN_LEAST_EPS
    ):
        found = aten.cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
        return (*found, 1)
    return compose(x, *args)
