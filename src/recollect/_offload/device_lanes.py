"""Which lanes each device has: its own, none because its memory is the host's, or none because it has no streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from recollect._offload.notices import Notices
from recollect._offload.streams import DeviceLanes, Lanes


class LanesByDevice:
    """The lanes of the devices that a session meets, made when it does.

    Args:
        make: the lanes of a device.
        notices: is told of devices that can have none.
    """

    __slots__ = ("_found", "_make", "_notices")

    def __init__(self, make: Callable[[torch.device], Lanes], notices: Notices) -> None:
        self._make, self._notices = make, notices
        self._found: dict[torch.device, Lanes | Literal[False] | None] = {}

    def of(self, device: torch.device) -> Lanes | Literal[False] | None:
        """The lanes of a device; None if values there are in host memory by nature, False if it can have none."""
        if device not in self._found:
            self._found[device] = self._find(device)
        return self._found[device]

    def _find(self, device: torch.device) -> Lanes | Literal[False] | None:
        if device.type == "meta" or (device.type == "cpu" and self._make is DeviceLanes):
            return None if device.type == "cpu" else False
        try:
            return self._make(device)
        except (RuntimeError, NotImplementedError) as error:
            self._notices.note_warning(
                f"{device}", f"values on {device} stay there: it cannot copy while it computes ({error})"
            )
            return False
