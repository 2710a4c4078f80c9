"""Memory that the kernels of a compiled graph take and give back while they run.

What Inductor writes itself takes nothing beside its results. Convolutions, attention and sorting it leaves to
libraries, which take workspaces as they do in eager code: on CUDA as `_profile/dry/workspaces.py` has it, on the CPU
copies of a convolution's weight in the library's own layout, one for its result and two for its gradients. If an image
has few channels, its gradients take 1.7 times its bytes. Of depthwise convolutions, the image is copied, and for its
gradients two more times, by the library and by Inductor; if it lies with the channels last and the kernel is wider than
3 x 3, the weight's gradient is added up in 256 parts. Where Inductor has convolutions read their images with the
channels last, they are taken to lie so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from recollect._compile.joint import hint
from recollect._compile.nodes import bytes_of
from recollect._core.torch_private.ops import op_name
from recollect._profile.dry.roofline import find_device
from recollect._profile.dry.workspaces import find_workspace

_LIBRARIES = ("convolution", "attention", "sort")
_CONVOLUTION, _CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
_FEW_CHANNELS = 16  # less than a vector of the processor
_PARTS, _NARROW = 258, 9  # measured, for 16 to 128 channels, 2 to 32 images, kernels of 5 to 9, 1 to 4 threads
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def workspaces_of(joint: fx.GraphModule, *, has_channels_last: bool) -> Callable[[fx.Node], int]:
    """What says how many bytes a node takes while it runs, beside what it reads and gives.

    Args:
        joint: the graph.
        has_channels_last: whether convolutions read images with the channels last, however they lie in the graph.
    """
    values = (node.meta.get("val") for node in joint.graph.nodes)
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    if device.type == "cpu":
        return functools.partial(_count_on_cpu, has_channels_last=has_channels_last)
    if device.type != "cuda":
        return lambda node: 0
    try:
        known = find_device(device)
    except ValueError:
        return lambda node: 0

    def count(node: fx.Node) -> int:
        name = op_name(node.target) or ""
        workspace = find_workspace(name) if any(library in name for library in _LIBRARIES) else None
        if workspace is None:
            return 0
        args, result = fx.node.map_arg((node.args, node.meta.get("val")), lambda one: one.meta.get("val"))
        if has_channels_last and "convolution" in name:
            args, result = _turn(args), _turn(result)
        return hint(workspace(known, tuple(args), result))

    return count


def _count_on_cpu(node: fx.Node, *, has_channels_last: bool) -> int:
    name = op_name(node.target) or ""
    if name == _CONVOLUTION:
        image, weight = _argument(node, 0), _argument(node, 1)
        return bytes_of(weight) + (bytes_of(image) if node.args[8] != 1 else 0)
    if name != _CONVOLUTION_BACKWARD:
        return 0
    image, weight = _argument(node, 1), _argument(node, 2)
    if _adds_up_apart(image.meta["val"], weight.meta["val"], node.args[9], is_turned=has_channels_last):
        return _PARTS * bytes_of(weight) + bytes_of(image)
    images = 3.0 if node.args[9] != 1 else 1.7 if hint(image.meta["val"].shape[1]) < _FEW_CHANNELS else 0.0
    return 2 * bytes_of(weight) + int(images * bytes_of(image))


def _adds_up_apart(image: Tensor, weight: Tensor, groups: Any, *, is_turned: bool) -> bool:
    """Whether a depthwise convolution's gradient is added up in many parts: where it finds the channels last.

    Where Inductor turns images, some come out in a third order instead; which ones, depends on what is recomputed. So
    all are taken to lie with the channels last there.
    """
    is_depthwise = groups != 1 and groups == hint(image.shape[1]) and image.dim() in _LAST
    is_wide = math.prod(map(hint, weight.shape[2:])) > _NARROW
    return is_depthwise and is_wide and (is_turned or image.is_contiguous(memory_format=_LAST[image.dim()]))


def _argument(node: fx.Node, at: int) -> fx.Node:
    found = node.args[at]
    assert isinstance(found, fx.Node)
    return found


def _turn(values: Any) -> Any:
    """Images with their channels last: only what fake tensors say of themselves."""
    if isinstance(values, (tuple, list)):
        return type(values)(map(_turn, values))
    if isinstance(values, Tensor) and values.dim() in _LAST:
        return values.to(memory_format=_LAST[values.dim()])
    return values
