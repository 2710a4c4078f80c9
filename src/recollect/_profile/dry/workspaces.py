"""Memory that operators take on CUDA and give back before they return, from their arguments.

A mode that watches operators does not see it. The sizes are models of what torch 2.11 with cuDNN 9 took on an H200 (the
allocator's peak around single operators), some exact, those of convolutions within some percent:

reductions      a buffer for partial results, where several blocks reduce to one output: torch's own launch rule
convolutions    images in cuDNN's layout (channels last, 16-byte channels) where they are not; 1 x 1 ones need none
attention       gradients of the query in float32, a number for each row, gradients of all heads where keys have fewer
embedding       partial sums, one row for each index and ten, and sorted indices
softmax         the product of gradient and output; normalised losses their elements before they are summed
contiguous      a copy of a gradient that is not contiguous, where the kernel needs it so
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect._profile.dry.roofline import Device

_MIB = 2**20
_SEMAPHORES = 512
_HALVES = (torch.float16, torch.bfloat16)

Workspace = Callable[[Device, tuple[Any, ...], Any], int]


def find_workspace(name: str) -> Workspace | None:
    """What computes the workspace of an operator, from its arguments and its result; None for those without any."""
    return _TABLE.get(name)


def _tensors(args: tuple[Any, ...], count: int) -> tuple[Tensor, ...]:
    return args[:count]


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.dtype.itemsize


def _copied(tensor: Tensor | None) -> int:
    """Bytes of a copy, if it is not contiguous."""
    return 0 if tensor is None or tensor.is_contiguous() else _nbytes(tensor)


# Reductions.

_MOST_THREADS, _WARP, _FEWEST_VALUES, _MOST_VALUES, _ACCUMULATOR = 512, 32, 16, 256, 4


def reduction_bytes(device: Device, *, outputs: int, inputs: int) -> int:
    """The buffer of a sum of `inputs` rows of `outputs` neighbours each, as for the gradient of a bias.

    >>> from recollect._profile.dry.roofline import find_device
    >>> reduction_bytes(find_device("H200"), outputs=1024, inputs=8192)
    67109376
    """
    if not outputs or not inputs:
        return 0
    vector = math.gcd(outputs, 4)
    columns = outputs // vector
    threads = _MOST_THREADS // vector
    width = min(_power_below(columns), threads, _WARP)
    height = min(_power_below(inputs), threads // width)
    width = min(_power_below(columns), threads // height)
    grid = -(-columns // width)
    values = -(-inputs // height)
    target = device.processors * (device.threads_per_processor // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return 0 if blocks <= 1 else _ACCUMULATOR * outputs * blocks * width * vector + _SEMAPHORES


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _sum(device: Device, args: tuple[Any, ...], _: Any) -> int:
    x: Tensor = args[0]
    dims: Sequence[int] = args[1] if len(args) > 1 and args[1] is not None else range(x.dim())
    reduced = {dim % max(x.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims)}
    kept = [dim for dim in range(x.dim()) if dim not in reduced and x.shape[dim] > 1]
    rows = math.prod(x.shape[dim] for dim in reduced)
    if not kept or min(x.stride(dim) for dim in kept) != 1:
        return 0
    if any(x.shape[dim] > 1 and x.stride(dim) <= max(x.stride(k) for k in kept) for dim in reduced):
        return 0
    return reduction_bytes(device, outputs=math.prod(x.shape[dim] for dim in kept), inputs=rows)


# Convolutions.

_SPLIT_BYTES = 8 * _MIB


def _is_channels_last(x: Tensor) -> bool:
    kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
    kind = kinds.get(x.dim())
    return kind is not None and x.is_contiguous(memory_format=kind) and not x.is_contiguous()


def _padded(x: Tensor, *, is_weight: bool = False) -> int:
    """Bytes with channels in steps of 16 bytes."""
    step = 16 // x.dtype.itemsize if x.dtype.itemsize < 16 else 1  # noqa: PLR2004
    channels = x.shape[1]
    rows = x.shape[0] if not is_weight else -(-x.shape[0] // step) * step
    return rows * (-(-channels // step) * step) * math.prod(x.shape[2:]) * x.dtype.itemsize


def _is_pointwise(weight: Tensor, stride: Sequence[int], x: Tensor) -> bool:
    size = math.prod(x.shape[2:])
    return all(n == 1 for n in weight.shape[2:]) and all(n == 1 for n in stride) and size % 8 == 0


def _convolution(device: Device, args: tuple[Any, ...], result: Any) -> int:
    x, weight = _tensors(args, 2)
    stride, groups = args[3], args[8]
    if groups == x.shape[1] > 1:
        return 0
    lies_right = _is_channels_last(x) or _is_channels_last(weight)
    if lies_right:
        return sum(_padded(t) + _padded(weight) for t in (x, result) if _padded(t) != _nbytes(t)) + _copied_as_last(x)
    if _is_pointwise(weight, stride, x):
        return 0
    return _padded(x) + _padded(result) + _padded(weight, is_weight=True) + _copied(x)


def _copied_as_last(x: Tensor) -> int:
    return 0 if _is_channels_last(x) else _nbytes(x)


def _convolution_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    gradient, x, weight = _tensors(args, 3)
    stride, groups, wanted = args[4], args[9], args[10]
    lies_right = _is_channels_last(x) or _is_channels_last(weight)
    copied = _copied_as_last(gradient) if lies_right else _copied(gradient)
    sums = 0
    if wanted[2] and (lies_right or _is_channels_last(gradient)):
        sums = reduction_bytes(device, outputs=gradient.shape[1], inputs=gradient.numel() // max(gradient.shape[1], 1))
    if groups == x.shape[1] > 1:
        return max(copied, sums)
    split = min(_SPLIT_BYTES, 4 * weight.numel() * 16)
    if lies_right:
        unaligned = sum(_padded(t) for t in (x, gradient) if _padded(t) != _nbytes(t))
        return copied + max(unaligned + split, sums)
    if _is_pointwise(weight, stride, x):
        return copied + min(4 * weight.numel() * x.shape[0], _nbytes(x) + _nbytes(gradient))
    return copied + max(_padded(x) + _padded(gradient) + max(_padded(weight), split), sums)


# Attention.


def _attention_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    gradient, query, key, value = _tensors(args, 4)
    batch, heads, rows = query.shape[:3]
    taken = 4 * query.numel() + 4 * batch * heads * rows + _SEMAPHORES
    if key.shape[1] != heads:
        taken += (_nbytes(key) + _nbytes(value)) * (heads // key.shape[1])
    if 0 in gradient.stride():
        taken += _nbytes(gradient)
    return taken


def _flash_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    gradient, query, key, value, out = _tensors(args, 5)
    batch, heads, rows, head = query.shape
    rounded = -(-rows // 128) * 128
    wide = -(-head // 32) * 32
    taken = 4 * batch * rounded * heads * wide + 4 * batch * heads * rounded
    if key.shape[1] != heads:
        taken += (_nbytes(key) + _nbytes(value)) * (heads // key.shape[1])
    return taken + sum(_nbytes(t) for t in (gradient, out) if not _lies_by_rows(t))


def _lies_by_rows(x: Tensor) -> bool:
    """Whether the heads of a row are neighbours in memory, as these kernels want it."""
    _, heads, rows, head = x.shape
    return x.stride() == (rows * heads * head, head, heads * head, 1)


def _efficient_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    gradient, query = _tensors(args, 2)
    taken = 4 * query.numel() + 8 * query.numel() // query.shape[-1]
    return taken + (0 if _lies_by_rows(gradient) else _nbytes(gradient))


def _efficient(device: Device, args: tuple[Any, ...], result: Any) -> int:
    (query,) = _tensors(args, 1)
    widest = 128
    return 4 * query.numel() if query.dtype in _HALVES and query.shape[-1] > widest else 0


# Others.

_FEW_INDICES = 3072
_BYTES_FOR_INDEX = 49


def _embedding_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    gradient, indices = _tensors(args, 2)
    weights: int = args[2]
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _FEW_INDICES:
        return _copied(gradient)
    rows = count // 10 + min(count, weights)
    return 4 * rows * width + _BYTES_FOR_INDEX * count + _copied(gradient)


def _softmax_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    return _nbytes(args[0])


def _safe_softmax(device: Device, args: tuple[Any, ...], result: Any) -> int:
    x: Tensor = args[0]
    return x.numel() + x.numel() // max(x.shape[-1], 1)


def _loss(device: Device, args: tuple[Any, ...], result: Any) -> int:
    return _nbytes(args[0]) if result.dim() == 0 and args[0].dim() else 0


def _norm_backward(device: Device, args: tuple[Any, ...], result: Any) -> int:
    return _copied(args[0]) + _copied(args[1])


def _sort(device: Device, args: tuple[Any, ...], result: Any) -> int:
    (x,) = _tensors(args, 1)
    return _nbytes(x) + 8 * x.numel()


def _index_put(device: Device, args: tuple[Any, ...], result: Any) -> int:
    accumulates = args[3] if len(args) > 3 else False  # noqa: PLR2004
    count = max((index.numel() for index in args[1] if index is not None), default=0)
    return _BYTES_FOR_INDEX * count + _copied(args[2]) if accumulates else 0


_TABLE: dict[str, Workspace] = {
    "aten.sum.dim_IntList": _sum,
    "aten.mean.dim": _sum,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _attention_backward,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._safe_softmax.default": _safe_softmax,
    "aten.native_layer_norm_backward.default": _norm_backward,
    "aten._fused_rms_norm_backward.default": _norm_backward,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort,
    "aten.index_put.default": _index_put,
    "aten.index_put_.default": _index_put,
    "aten._index_put_impl_.default": _index_put,
    **{
        f"aten.{name}.default": _loss
        for name in (
            *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"),
            "binary_cross_entropy_with_logits",
        )
    },
}
