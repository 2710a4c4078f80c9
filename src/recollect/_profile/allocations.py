"""What single operators take on a CUDA device beside their results, read off its allocator while a step runs.

Libraries choose their workspaces by version, device and shape, so that rules are good for steps that cannot be run here
and off by a tenth of a peak where convolutions set it. The allocator knows: the most that was in use while an operator
ran, less what is in use when it has returned. That is read twice for each operator and kind of arguments, and the less
counts: whatever else happens while one of them runs is not the operator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect._core.operators import Operator

_TIMES = 2

Key = tuple[Any, ...]
Read = Callable[[], tuple[int, int]]
"""Gives the bytes that are in use now, and the most since the last reset."""


class AllocationMeter:
    """Measures what operators take and give back while they run.

    To measure, the allocator's peak is reset. So `peak_bytes` says what it was, and nobody else may ask for it.

    Args:
        read: see `Read`.
        reset: forgets the most that was in use.

    >>> used = iter([(10, 12), (15, 40)])
    >>> meter = AllocationMeter(lambda: next(used), lambda: None)
    >>> from recollect._core.operators import operator_of
    >>> key = meter.begin(operator_of(torch.ops.aten.mm.default), (torch.ones(2, 2), torch.ones(2, 2)), {})
    >>> meter.end(key), meter.peak_bytes
    (25, 40)
    """

    def __init__(self, read: Read, reset: Callable[[], None]) -> None:
        self._read, self._reset = read, reset
        self._known: dict[Key, list[int]] = {}
        self._most = 0

    @property
    def peak_bytes(self) -> int:
        """The most that was in use when an operator was measured or before, since `start`."""
        return self._most

    def start(self) -> None:
        """A step begins; what operators take is still known."""
        self._most = 0

    def begin(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
        """An operator is about to run. Gives what `end` wants; None if it cannot be measured."""
        if operator.is_view or operator.is_collective:
            return None
        if torch.backends.cudnn.benchmark and "convolution" in operator.name:
            return None  # the first call of each kind tries kernels, in memory that later ones do not take
        key = (operator.name, _sign(args), _sign(tuple(kwargs.values())))
        if len(self._known.get(key, ())) < _TIMES:
            self._most = max(self._most, self._read()[1])
            self._reset()
        return key

    def end(self, key: Key) -> int | None:
        """The operator has returned: what it took beside its results; None if the allocator does not tell."""
        found = self._known.setdefault(key, [])
        if len(found) < _TIMES:
            now, most = self._read()
            if not now:
                return None
            self._most = max(self._most, most)
            found.append(max(0, most - now))
        return min(found)


def meter_on(device: torch.device) -> AllocationMeter | None:
    """What measures operators on a device; None where there is no such allocator."""
    if device.type != "cuda":
        return None

    def read() -> tuple[int, int]:
        used = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
        return used.get("current", 0), used.get("peak", 0)

    return AllocationMeter(read, lambda: torch.cuda.reset_peak_memory_stats(device))


def _sign(value: Any) -> Any:
    """What two arguments have in common if an operator does the same with both."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return type(value), id(value)
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (tuple, list)):
        return tuple(map(_sign, value))
    return value if isinstance(value, (int, float, str, bool, type(None), torch.dtype)) else repr(value)
