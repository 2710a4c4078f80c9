"""Helpers around device random states that older code imports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.pytree import tree_leaves


class DefaultDeviceType:
    """The device type to assume if no tensor has one: that of the available accelerator, or else ``cpu``.

    >>> from recollect.compat import DefaultDeviceType
    >>> before = DefaultDeviceType.get_device_type()
    >>> DefaultDeviceType.set_device_type("meta")
    >>> DefaultDeviceType.get_device_type()
    'meta'
    >>> DefaultDeviceType.set_device_type(before)
    """

    _chosen: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Choose the type."""
        DefaultDeviceType._chosen = device

    @staticmethod
    def get_device_type() -> str:
        """The chosen type, or the available accelerator's, or ``cpu``."""
        if DefaultDeviceType._chosen is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            return "cpu" if found is None else found.type
        return DefaultDeviceType._chosen


def _devices_of(values: Iterable[Any]) -> list[torch.device]:
    tensors = (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor))
    return list(dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta")))


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """Get the random states of the accelerators that hold these values, as device indices and states.

    >>> import torch
    >>> from recollect.compat import get_device_states
    >>> get_device_states(torch.ones(1), {"y": [2]})
    ([], [])
    """
    devices = _devices_of(args)
    return (
        [device.index for device in devices],
        [torch.get_device_module(device).get_rng_state(device) for device in devices],
    )


def set_device_states(devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None) -> None:
    """Set random states that `get_device_states` returned. Without devices, or for ``meta``, nothing happens.

    >>> from recollect.compat import set_device_states
    >>> set_device_states([], [])
    """
    kind = device_type or DefaultDeviceType.get_device_type()
    if kind == "meta" or not devices:
        return
    module = torch.get_device_module(kind)
    for index, state in zip(devices, states, strict=True):
        module.set_rng_state(state, index)
