"""Makes a Profile of what a capture wrote down: links backward to forward, and says what all memory is for."""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Received, Saved, Storage, Transfer, Value
from recollect._profile.capture import Capture
from recollect._profile.raw import RawCall, RawValue
from recollect._profile.storage_log import BEFORE
from recollect._profile.timing import Span


@dataclass(slots=True, kw_only=True)
class Known:
    """What is known of a step beyond what was captured.

    Attributes:
        device: the type of device that is profiled.
        names: of storages that were there before, by number.
        categories: of the same.
        blocks: paths of the model's repeated blocks.
        paths: of all its modules.
    """

    device: torch.device
    names: dict[int, str] = field(default_factory=dict)
    categories: dict[int, Category] = field(default_factory=dict)
    blocks: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()

    def add(self, numbers: Iterable[int], category: Category, name: str) -> None:
        """These storages, there before, are that; who says so first is right."""
        for number in numbers:
            self.names.setdefault(number, name)
            self.categories.setdefault(number, category)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The parts of a Profile that a capture gives."""

    storages: tuple[Storage, ...]
    calls: tuple[OpCall, ...]
    saved: tuple[Saved, ...]
    transfers: tuple[Transfer, ...]
    received: tuple[Received, ...]


def assemble(capture: Capture, known: Known, spans: Sequence[Span | None]) -> Assembled:
    """The calls, storages and saved edges of a captured step; `spans` are of its first calls, others have none."""
    raws = capture.calls
    for raw in raws:
        runs_again = raw.phase is Phase.RECOMPUTATION and (raw.run is not None or not raw.source)
        if runs_again and not raw.module and raw.region in known.paths:
            raw.module = raw.region  # whose own code runs again, without a call of the module
    links = _Links(raws)
    forwards = [links.forward_of(raw) for raw in raws]
    head = _find_head(raws, known)
    in_head = [at in head or (forward is not None and forward in head) for at, forward in enumerate(forwards)]
    saved = _find_saved(capture, links)
    categories = _categorise(capture, known, saved, in_head)
    calls = _make_calls(capture, known, forwards, spans)
    storages = tuple(
        Storage(
            bytes=entry.nbytes,
            lifetime=Lifetime.STEP if entry.is_given else Lifetime.VALUE,
            name=known.names.get(number, ""),
            category=categories[number],
            device="" if entry.device.type in (known.device.type, "meta") else str(entry.device),
            made_at=None if entry.made_at == BEFORE else entry.made_at,
            freed_at=entry.freed_at,
            in_variable_until=entry.in_variable_until,
        )
        for number, entry in enumerate(capture.storages.entries)
    )
    transfers = tuple(capture.travels.transfers)
    received = tuple(capture.receptions.list(calls, saved, capture.whereabouts.places.path_of))
    return Assembled(storages=storages, calls=calls, saved=saved, transfers=transfers, received=received)


class _Links:
    """Finds the forward call that a call of backward or of recomputation belongs to.

    Autograd numbers its nodes in the order of forward, and a node is made just before its operator runs. So the first
    forward call with a node's number is its operator; a node that is made after (of a write into a view) belongs to
    the call before it. A call of recomputation is the n-th of its operator in its module, as in forward, or on its line
    where it is made again without the module's code.
    """

    def __init__(self, raws: Sequence[RawCall]) -> None:
        self._first: dict[int, int] = {}
        self._alike: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        self._again: Counter[tuple[object, ...]] = Counter()
        for number, raw in enumerate(raws):
            if raw.phase is Phase.FORWARD:
                self._first.setdefault(raw.sequence, number)
                self._alike[raw.region, f"in {raw.module}", raw.operator.name].append(number)
                self._alike[raw.region, f"at {raw.source}", raw.operator.name].append(number)
        self._numbers = sorted(self._first)

    def by_sequence(self, sequence: int) -> int | None:
        """The forward call of a node."""
        if sequence in self._first:
            return self._first[sequence]
        at = bisect.bisect_right(self._numbers, sequence)
        return self._first[self._numbers[at - 1]] if at else None

    def forward_of(self, raw: RawCall) -> int | None:
        """The forward call that a call belongs to; to be asked once for each, in their order."""
        if raw.phase is Phase.BACKWARD and raw.sequence >= 0:
            return self.by_sequence(raw.sequence)
        if raw.phase is Phase.RECOMPUTATION:
            where = f"in {raw.module}" if raw.module else f"at {raw.source}"
            place = (raw.region, where, raw.operator.name)
            nth = self._again[raw.run, *place]
            self._again[raw.run, *place] += 1
            alike = self._alike.get(place, [])
            return alike[nth % len(alike)] if alike else None  # regions in each other run again several times
        return None


def _find_head(raws: Sequence[RawCall], known: Known) -> set[int]:
    """The forward calls after the last one in a repeated block; without blocks those at the end outside of modules."""
    head: set[int] = set()
    inside = {path for path in known.paths if any(path == b or path.startswith(f"{b}.") for b in known.blocks)}

    def is_body(raw: RawCall) -> bool:
        return raw.module in inside if inside else bool(raw.module)

    is_after = True
    for number in range(len(raws) - 1, -1, -1):
        raw = raws[number]
        if raw.phase is not Phase.FORWARD:
            is_after = True
        elif is_body(raw):
            is_after = False
        elif is_after:
            head.add(number)
    has_body = any(raw.phase is Phase.FORWARD and is_body(raw) for raw in raws)
    return head if has_body else set()


def _find_saved(capture: Capture, links: _Links) -> tuple[Saved, ...]:
    readers: dict[tuple[int, int], int] = {}
    for number, raw in enumerate(capture.calls):
        if raw.phase is Phase.BACKWARD and raw.sequence >= 0:
            for value in raw.inputs:
                readers.setdefault((raw.sequence, value[0]), number)
    found: dict[tuple[int, int], Saved] = {}
    for edge in capture.graphs.list_saved():
        by = links.by_sequence(edge.sequence)
        if by is not None:
            reader = readers.get((edge.sequence, edge.number))
            found.setdefault((edge.number, by), Saved(storage=edge.number, by=by, reader=reader))
    return tuple(found.values())


def _categorise(capture: Capture, known: Known, saved: Sequence[Saved], in_head: Sequence[bool]) -> list[Category]:
    """What each storage is for."""
    kept = {edge.storage for edge in saved}
    read = {value[0] for raw in capture.calls if raw.phase is Phase.BACKWARD for value in raw.inputs}
    found: list[Category] = []
    for number, entry in enumerate(capture.storages.entries):
        maker = None if entry.made_at == BEFORE else entry.made_at
        phase = capture.calls[maker].phase if maker is not None and maker < len(capture.calls) else None
        if number in known.categories:
            category = known.categories[number]
        elif number in capture.travels.offloaded:
            category = Category.OFFLOADED
        elif number in capture.gradients:
            category = Category.GRADIENT
        elif number in capture.states:
            category = Category.OPTIMIZER
        elif entry.is_given or maker is None:
            category = Category.INPUT
        elif maker < len(in_head) and in_head[maker]:
            category = Category.LOSS_HEAD
        elif (number in kept and phase is Phase.FORWARD) or (phase is Phase.RECOMPUTATION and number in read):
            category = Category.ACTIVATION
        else:
            category = Category.TEMPORARY
        found.append(category)
    return found


def _make_calls(
    capture: Capture, known: Known, forwards: Sequence[int | None], spans: Sequence[Span | None]
) -> tuple[OpCall, ...]:
    counts: Counter[tuple[Phase, str, str]] = Counter()
    entries, values = capture.storages.entries, _Values(capture)
    owners = {
        number: name.rpartition(".")[0]
        for number, name in known.names.items()
        if known.categories[number] is Category.PARAMETER
    }
    chosen: set[int] = set()
    calls: list[OpCall] = []
    for raw, forward, span in zip_longest(capture.calls, forwards, spans):
        operator, origin = raw.operator, raw if forward is None else capture.calls[forward]
        region = origin.region if raw.phase is not Phase.OPTIMIZER else ""
        nth = counts[raw.phase, region, operator.name]
        counts[raw.phase, region, operator.name] += 1
        module = origin.module or raw.module or owners.get(raw.leaf, "")
        if raw.phase is Phase.OPTIMIZER:
            module = next((owners[value[0]] for value in raw.inputs if value[0] in owners), "")
        old = [number for number in raw.writes if entries[number].is_given]
        is_routing = operator.is_routing or _follows_choice(raw, chosen)
        if is_routing:
            chosen.update(value[0] for value in raw.outputs)
        calls.append(
            OpCall(
                op=operator.name,
                phase=raw.phase,
                inputs=values.make(raw.inputs),
                outputs=values.make(raw.outputs),
                writes=tuple(raw.writes),
                region=region,
                module=module,
                scopes=origin.scopes,
                call=nth,
                source=origin.source or raw.source,
                flops=raw.flops,
                seconds=None if span is None else span.device_s,
                device_s=None if span is None else span.device_s,
                host_s=None if span is None else span.host_s,
                workspace_bytes=raw.workspace_bytes,
                is_random=operator.is_random,
                is_routing=is_routing,
                is_collective=operator.is_collective,
                runs_once=bool(old) or operator.hides_writes,
                forward=forward,
                nth_pass=raw.nth_pass if raw.phase is Phase.BACKWARD else 0,
                within=raw.within,
                entered=raw.entered,
                is_scripted=raw.is_scripted,
                is_assignment=raw.is_assignment,
            )
        )
    return tuple(calls)


def _follows_choice(raw: RawCall, chosen: set[int]) -> bool:
    """Whether whole numbers or truths are counted out of routing results: indices, masks, counts, offsets."""
    if not chosen or not raw.outputs or any(dtype.is_floating_point or dtype.is_complex for _, _, dtype in raw.outputs):
        return False
    return any(value[0] in chosen for value in raw.inputs)


class _Values:
    """Makes values of raw ones; a step has few shapes."""

    def __init__(self, capture: Capture) -> None:
        self._entries = capture.storages.entries
        self._known: dict[tuple[torch.Size, torch.dtype], tuple[tuple[int, ...], str, int]] = {}

    def make(self, raws: Iterable[RawValue]) -> tuple[Value, ...]:
        return tuple(map(self._make, raws))

    def _make(self, raw: RawValue) -> Value:
        number, size, dtype = raw
        if size is None:
            return Value(storage=number, dtype=_name(dtype), bytes=self._entries[number].nbytes)
        known = self._known.get((size, dtype))
        if known is None:
            shape = tuple(map(int, size))
            known = self._known[size, dtype] = (shape, _name(dtype), math.prod(shape) * dtype.itemsize)
        shape, name, nbytes = known
        return Value(storage=number, shape=shape, dtype=name, bytes=nbytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def include_all(capture: Capture, known: Known, tensors: Iterable[tuple[str, Tensor]], category: Category) -> None:
    """Count tensors that are there before the step, with their gradients."""
    for name, tensor in tensors:
        known.add(capture.include(tensor), category, name)
        if tensor.is_leaf and tensor.grad is not None:
            known.add(capture.include(tensor.grad), Category.GRADIENT, f"{name}.grad")
