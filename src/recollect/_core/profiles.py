"""Profile: what a training step does, operator by operator. Plain data; no torch here, operators are strings."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recollect._core.calls import Made, OpCall, Received, Saved, Storage, Transfer
from recollect._core.decisions import Decision
from recollect._core.documents import read_document, write_document
from recollect._core.profile_text import describe_profile, profile_as_html
from recollect._core.timeline import Timeline, count_forward, find_made
from recollect._core.units import count_noun

_VERSION = 4
_MOST = 2**63
_LONGEST_S = 1e9


class Clock(enum.Enum):
    """Where the times of calls come from."""

    DEVICE = "measured on the device"
    HOST = "measured on the host"
    ROOFLINE = "estimated from operations and bytes moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntry:
    """A module of the model.

    Attributes:
        path: its name in the model; ``""`` for the model itself.
        kind: the name of its class.
    """

    path: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry:
    """What one entry of a policy did in one region, or in several identical ones.

    Attributes:
        region: name of the region, or of the first of them.
        regions: how many they are.
        rule: the entry, as it is written.
        decision: what became of the values.
        values: how many it decided, in all of them.
        bytes: of these.
    """

    region: str
    rule: str
    decision: Decision
    regions: int = 1
    values: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEntry:
    """What a device's allocator said of the step.

    Attributes:
        device: which.
        peak_bytes: the most that tensors had of it at a time.
        reserved_bytes: the most that it had of the device at a time: more than the peak by what lies unused, because it
            is cached or in pieces too small.
        total_bytes: what the device has.
    """

    device: str
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, repr=False)  # without slots, for what is worked out when it is first asked
class Profile:
    """A step as data, made by `recollect.profile`: its operators in order, its memory and its times.

    Attributes:
        storages: all memory that tensors of the step use; other fields refer to it by index.
        calls: the operators, in the order in which they ran.
        saved: the tensors that forward keeps for backward, call by call.
        device: the device it was measured on or estimated for, such as ``"NVIDIA H200"``.
        name: what was profiled, such as the class of the model.
        clock: where the times of the calls come from; None if they have none.
        is_dry: whether the step was traced on fake tensors. Bytes and times are then estimates.
        rounding_bytes: each storage uses a multiple of this on the device.
        capacity_bytes: the memory that the device has for tensors; 0 if unknown.
        fixed_bytes: memory that libraries hold on the device all the time, in addition to the storages.
        optimizer: name of the optimizer whose state is counted; ``""`` for none.
        torch: version of torch.
        modules: the model's modules, in its order.
        rules: what each entry of a policy matched, if regions were applied.
        allocators: figures from the devices' allocators, if there are any.
        notes: what was assumed or could not be seen, in sentences.
        transfers: copies of values to other tiers and back, if some are offloaded.
        received: what modules were called with, where their calls do not show it.
        under_regions: the same step as it runs under regions, if that differs: a Transformers model then fills no
            key/value cache. Plans are made for it.

    Raises:
        ValueError: it refers to a storage or call that does not exist, or a number is impossible.

    >>> import torch, recollect
    >>> step = recollect.profile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.ones(4, 8))
    >>> [step.calls[made.call].op for made in step.made()][:2]
    ['aten.addmm.default', 'aten.relu.default']
    >>> Profile.from_json(step.to_json()) == step
    True
    """

    storages: tuple[Storage, ...]
    calls: tuple[OpCall, ...]
    saved: tuple[Saved, ...] = ()
    device: str = ""
    name: str = ""
    clock: Clock | None = None
    is_dry: bool = False
    rounding_bytes: int = 1
    capacity_bytes: int = 0
    fixed_bytes: int = 0
    optimizer: str = ""
    torch: str = ""
    modules: tuple[ModuleEntry, ...] = ()
    rules: tuple[RuleEntry, ...] = ()
    allocators: tuple[AllocatorEntry, ...] = ()
    notes: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    received: tuple[Received, ...] = ()
    under_regions: Profile | None = None

    def __post_init__(self) -> None:
        _check_sizes(
            "the profile",
            capacity_bytes=self.capacity_bytes,
            fixed_bytes=self.fixed_bytes,
            rounding_bytes=self.rounding_bytes,
        )
        if not self.rounding_bytes:
            message = "the profile has rounding_bytes=0: expected at least 1"
            raise ValueError(message)
        for number, storage in enumerate(self.storages):
            _check_storage(storage, len(self.calls), f"storage {number}")
        for number, call in enumerate(self.calls):
            self._check_call(call, f"call {number} ({call.op})")
        for edge in self.saved:
            _check_indices({edge.storage}, len(self.storages), f"{edge}", "storage")
            _check_indices({edge.by, edge.reader or 0}, len(self.calls), f"{edge}", "call")
        for transfer in self.transfers:
            _check_indices({transfer.storage}, len(self.storages), f"{transfer}", "storage")
            _check_indices({transfer.start, transfer.end}, len(self.calls) + 1, f"{transfer}", "call")
            _check_sizes(f"{transfer}", bytes=transfer.bytes)
        for one in self.received:
            _check_indices(set(one.storages), len(self.storages), f"{one}", "storage")
            _check_indices({one.call}, len(self.calls) + 1, f"{one}", "call")

    def _check_call(self, call: OpCall, where: str) -> None:
        count = len(self.storages)
        for value in (*call.inputs, *call.outputs):
            if not 0 <= value.storage < count:
                _check_indices({value.storage}, count, where, "storage")
        _check_indices(set(call.writes), count, where, "storage")
        _check_indices({call.forward or 0}, len(self.calls), where, "call")
        _check_sizes(where, flops=call.flops, workspace_bytes=call.workspace_bytes)
        for seconds in (call.seconds, call.device_s, call.host_s):
            if seconds is not None and not 0 <= seconds < _LONGEST_S:
                message = f"{where} takes {seconds} seconds: expected 0 or more, and less than {_LONGEST_S:g}"
                raise ValueError(message)

    def __repr__(self) -> str:
        """One line; `recollect.report` shows all of it."""
        return f"<Profile of {describe_profile(self)}>"

    def _repr_html_(self) -> str:
        return profile_as_html(self)

    @functools.cached_property
    def forward_count(self) -> int:
        """The number of calls in forward, up to the first that is not."""
        return count_forward(self.calls)

    def made(self) -> Iterator[Made]:
        """Each storage that a call makes, with the first call and output on it, in order."""
        return find_made(self.storages, self.calls)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """When each storage exists, and how many bytes are in use at each call."""
        return Timeline(self.storages, self.calls, rounding_bytes=self.rounding_bytes, fixed_bytes=self.fixed_bytes)

    @functools.cached_property
    def derived(self) -> dict[str, object]:
        """What other parts of recollect computed from this profile, by name; kept with it, but not a part of it."""
        return {}

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at any time, on the device that is profiled."""
        return self.timeline.peak_bytes

    @property
    def step_s(self) -> float | None:
        """How long the step takes; None if unknown."""
        return _sum_known(call.seconds for call in self.calls)

    @property
    def device_s(self) -> float | None:
        """How long the device is busy in the step; None if unknown."""
        return _sum_known(call.device_s for call in self.calls)

    @property
    def host_s(self) -> float | None:
        """How long the host is busy launching; None if unknown, or if the host runs the step itself.

        The step takes as long as the larger of this and `device_s`, and longer where one waits for the other: `step_s`.
        """
        return _sum_known(call.host_s for call in self.calls)

    def to_json(self) -> str:
        """The profile as text that `from_json` reads."""
        return write_document(self, kind="profile", version=_VERSION)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            ValueError: the text is not a profile, is damaged, or has a later version.
        """
        return read_document(text, cls, kind="profile", version=_VERSION)


def _sum_known(seconds: Iterable[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return sum(known) if known else None


def _check_sizes(where: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not 0 <= size < _MOST:
            message = f"{where} has {name}={size}: expected 0 or more, and less than 2**63"
            raise ValueError(message)


def _check_storage(storage: Storage, calls: int, where: str) -> None:
    _check_sizes(where, bytes=storage.bytes)
    start, end = storage.made_at, storage.freed_at
    if not all(0 <= at <= calls for at in (start, end) if at is not None) or (start or 0) > (
        calls if end is None else end
    ):
        message = (
            f"{where} is made at call {start} and freed at call {end}, but the profile has {count_noun(calls, 'call')}"
        )
        raise ValueError(message)


def _check_indices(indices: set[int], count: int, where: str, noun: str) -> None:
    for index in indices:
        if not 0 <= index < count:
            message = f"{where} refers to {noun} {index}, but the profile has {count_noun(count, noun)}"
            raise ValueError(message)
