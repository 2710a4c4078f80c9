"""A step as one of many devices would run it under FSDP2: the state divided, and the buffers of its collectives.

Every repeated part of the model (``layers.*``) is a unit, what is left belongs to the root, as torchtitan and the
tutorials of FSDP2 shard a model. Parameters, their gradients, and what the optimizer keeps and makes are divided by the
number of devices. While a unit runs, its parameters are there whole; those of the next are being gathered into one
buffer, and copied out of it when it starts. The root is gathered for the whole of forward and backward. Gradients are
whole until their unit's backward is over; the buffer from which they are scattered lives until that of the next unit
is. All in the parameters' own dtypes.

Not counted: the time that collectives take, which is as if they hid behind the computation, and the padding of
parameters whose first dimension the devices do not divide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from recollect._core.calls import Category, Phase, Storage
from recollect._core.families import Families, paths_above
from recollect._core.profiles import Profile

_STATE = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stay:
    """From the first call of a unit in one phase to the last."""

    first: int
    last: int


def shard(profile: Profile, world: int) -> Profile:
    """The step as one of `world` devices runs it.

    Args:
        profile: of the step on one device, without any sharding.
        world: how many devices share the state; each has the batch that was profiled.

    Raises:
        ValueError: there is not at least one device.
    """
    if world < 1:
        message = f"world={world}: expected at least 1 device"
        raise ValueError(message)
    if world == 1 or not profile.calls:
        return profile
    units = _Units(profile)
    storages = [_divide(storage, world, units, at) for at, storage in enumerate(profile.storages)]
    note = (
        f"estimated for {world} devices that share parameters, gradients and optimizer state as FSDP2 does; "
        f"{len(units.owned)} units are gathered one ahead, and collectives are taken to be free"
    )
    return replace(profile, storages=(*storages, *units.list_buffers()), allocators=(), notes=(*profile.notes, note))


def _divide(storage: Storage, world: int, units: _Units, at: int) -> Storage:
    if storage.category in _STATE or units.is_of_optimizer(at):
        return replace(storage, bytes=-(-storage.bytes // world))
    return storage


class _Units:
    """The parts of a model that are gathered one by one; ``""`` is the root.

    Attributes:
        owned: bytes of parameters by unit; units without any are left out.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        families = Families(profile.modules)
        repeated = {module.path for module in profile.modules if families.name(module.path).endswith("*")}
        self._paths = {path for path in repeated if not any(above in repeated for above in [*paths_above(path)][1:])}
        self.owned: defaultdict[str, int] = defaultdict(int)
        for storage in profile.storages:
            if storage.category is Category.PARAMETER:
                self.owned[self._find_owner(storage.name)] += storage.bytes
        calls = profile.calls
        self._last_backward = max((at for at, call in enumerate(calls) if call.phase is Phase.BACKWARD), default=0)
        self._first_update = next((at for at, call in enumerate(calls) if call.phase is Phase.OPTIMIZER), len(calls))
        self._stays = {phase: self._find_stays(phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}

    def is_of_optimizer(self, at: int) -> bool:
        """Whether a storage is made in the optimizer's step: it works on shards."""
        return self._profile.timeline.spans[at][0] >= self._first_update

    def list_buffers(self) -> Iterator[Storage]:
        """What is in memory in addition to the shards."""
        root = self.owned.get("", 0)
        if root:
            yield _hold(root, 0, self._last_backward)
            yield _hold(root, 0, 0)
            yield _hold(root, self._last_backward, self._last_backward, Category.GRADIENT)
        for stays in self._stays.values():
            yield from self._gather(stays)
        yield from self._scatter()

    def _gather(self, stays: dict[str, _Stay]) -> Iterator[Storage]:
        before: _Stay | None = None
        for unit, stay in stays.items():
            size = self.owned[unit]
            yield _hold(size, stay.first, stay.last)
            yield _hold(size, stay.first if before is None else min(before.first, stay.first), stay.first)
            before = stay

    def _scatter(self) -> Iterator[Storage]:
        stays = self._stays[Phase.BACKWARD]
        for at, storage in enumerate(self._profile.storages):
            made = self._profile.timeline.spans[at][0]
            if storage.category is Category.GRADIENT and 0 <= made <= self._last_backward:
                stay = stays.get(self._find_owner(self._profile.calls[made].module))
                last = self._last_backward if stay is None else max(made, stay.last)
                yield _hold(storage.bytes, made, last, Category.GRADIENT)
        ends = [stay.last for stay in stays.values()]
        for (unit, stay), following in zip(stays.items(), [*ends[1:], self._last_backward], strict=False):
            yield _hold(self.owned[unit], stay.last, max(stay.last, following), Category.GRADIENT)

    def _find_stays(self, phase: Phase) -> dict[str, _Stay]:
        """When each unit runs, in the order in which they do."""
        found: dict[str, _Stay] = {}
        for at, call in enumerate(self._profile.calls):
            unit = self._find_owner(call.module)
            if call.phase is phase and unit and self.owned.get(unit):
                found[unit] = _Stay(first=found[unit].first if unit in found else at, last=at)
        return dict(sorted(found.items(), key=lambda item: item[1].first))

    def _find_owner(self, path: str) -> str:
        return next((above for above in paths_above(path) if above in self._paths), "")


def _hold(size: int, first: int, last: int, category: Category = Category.PARAMETER) -> Storage:
    """A buffer that is there while these calls run."""
    return Storage(bytes=size, category=category, made_at=first, freed_at=last + 1)
