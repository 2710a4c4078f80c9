"""The tables behind every report: where the peak is, what is saved, by module, by operator. No torch here."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recollect._core.calls import Category, OpCall, Phase
from recollect._core.families import paths_above
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes

_SAVED_CATEGORIES = (Category.ACTIVATION, Category.LOSS_HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """Where the most memory is in use.

    Attributes:
        bytes: how much.
        call: index of the call; -1 in a profile without calls.
        phase: which part of the step that is; None without calls.
        op: the operator.
        module: path of the module that calls it, or whose gradient it computes.
        source: the line of the user's code.
        region: name of the checkpointed region.
        by_category: what is there, by what it is for, largest first.
        recomputed_bytes: of these, what recomputation has made.
        sentence: all this in words: ``"in backward of lm_head (aten.mm.default, model.py:88)"``.
    """

    bytes: int
    call: int
    phase: Phase | None
    op: str
    module: str
    source: str
    region: str
    by_category: dict[Category, int]
    recomputed_bytes: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """A storage that forward leaves for backward.

    Attributes:
        storage: its index in the profile.
        bytes: how much it takes on the device.
        shape: of the tensor that was made on it first.
        dtype: of the same.
        op: the operator that made it.
        module: path of the module that called that.
        source: the line of the user's code.
        category: activations or loss head.
        holders: operators that keep it, one for each call that does.
    """

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    source: str
    category: Category
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module, and what is in it; numbers include its children unless they say otherwise.

    Attributes:
        path: its name in the model; ``""`` for the model itself, and for what is outside of all modules.
        kind: the name of its class; ``""`` if nobody said.
        depth: how deep it is in the tree; 0 for the model.
        saved_bytes: what forward leaves for backward.
        own_saved_bytes: the same without its children.
        parameter_bytes: of its parameters, each counted once.
        forward_s: how long its forward takes; None if the profile has no times.
        backward_s: the same of backward.
        recompute_s: the same of recomputation.
        flops: of its forward.
        calls: of operators in its forward.
    """

    path: str
    kind: str
    depth: int
    saved_bytes: int
    own_saved_bytes: int
    parameter_bytes: int
    forward_s: float | None
    backward_s: float | None
    recompute_s: float | None
    flops: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """An operator, in all parts of the step.

    Attributes:
        op: its name.
        calls: how often it runs.
        saved_bytes: of its results that forward leaves for backward.
        made_bytes: of all its results that have a storage of their own.
        seconds: how long it takes in all; None if the profile has no times.
        flops: in all.
    """

    op: str
    calls: int
    saved_bytes: int
    made_bytes: int
    seconds: float | None
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTotals:
    """What forward leaves for backward, in all.

    Attributes:
        count: how many tensors.
        bytes: of all of them.
        most_bytes: the most that is there at a time. It is less than `bytes` where a step has several forward passes,
            as with gradient accumulation: each pass frees what it saved before the next begins.
        passes: how many forward passes there are.
    """

    count: int
    bytes: int
    most_bytes: int
    passes: int

    @property
    def sentence(self) -> str:
        """Why they may be more than the peak; nothing where they are all there at once.

        >>> SavedTotals(count=8, bytes=4096, most_bytes=1024, passes=4).sentence
        'over 4 forward passes; each frees its own before the next, at most 1.00 KiB at a time'
        """
        if self.most_bytes >= self.bytes:
            return ""
        passes = f"over {self.passes} forward passes; " if self.passes > 1 else ""
        each = "each frees its own before the next, " if self.passes > 1 else ""
        return f"{passes}{each}at most {format_bytes(self.most_bytes)} at a time"


def find_peak(profile: Profile) -> PeakRow:
    """Where the step's peak is, and what is alive there.

    >>> from recollect._core.calls import Storage, Value
    >>> made = Value(storage=0, shape=(4,), dtype="float32", bytes=16)
    >>> call = OpCall(op="aten.relu.default", outputs=(made,), module="layers.3", source="model.py:41")
    >>> peak = find_peak(Profile(storages=(Storage(bytes=16),), calls=(call,)))
    >>> peak.bytes, peak.sentence
    (16, 'in forward of layers.3 (aten.relu.default, model.py:41)')
    """
    timeline, number = profile.timeline, profile.timeline.peak_call
    call = profile.calls[number] if number >= 0 else OpCall(op="")
    again = {made.storage for made in profile.made() if profile.calls[made.call].phase is Phase.RECOMPUTATION}
    return PeakRow(
        bytes=timeline.peak_bytes,
        call=number,
        phase=call.phase if number >= 0 else None,
        op=call.op,
        module=call.module,
        source=call.source,
        region=call.region,
        by_category=timeline.bytes_by_category(number),
        recomputed_bytes=sum(timeline.sizes[storage] for storage in timeline.alive_at(number) if storage in again),
        sentence=describe_call(call) if number >= 0 else "before the first call",
    )


def describe_call(call: OpCall) -> str:
    """Where a call is, in words.

    >>> describe_call(OpCall(op="aten.mm.default", phase=Phase.BACKWARD, module="lm_head"))
    'in backward of lm_head (aten.mm.default)'
    """
    where = "in the optimizer's step" if call.phase is Phase.OPTIMIZER else f"in {call.phase.value}"
    owner = f" of {call.module}" if call.module else ""
    return f"{where}{owner} ({', '.join(filter(None, (call.op, call.source)))})"


def list_saved(profile: Profile) -> list[SavedRow]:
    """The storages that forward makes and leaves for backward, largest first: activations and those of the loss head.

    Each is there once, however many calls keep it. Parameters and inputs are not among them, nor what is on another
    device.
    """
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for edge in profile.saved:
        holders[edge.storage].append(profile.calls[edge.by].op)
    rows = []
    for made in profile.made():
        call, storage, size = (
            profile.calls[made.call],
            profile.storages[made.storage],
            profile.timeline.sizes[made.storage],
        )
        if made.storage in holders and size and storage.category in _SAVED_CATEGORIES and call.phase is Phase.FORWARD:
            value = call.outputs[made.output]
            row = SavedRow(
                storage=made.storage,
                bytes=size,
                shape=value.shape,
                dtype=value.dtype,
                op=call.op,
                module=call.module,
                source=call.source,
                category=storage.category,
                holders=tuple(holders[made.storage]),
            )
            rows.append(row)
    return sorted(rows, key=lambda row: -row.bytes)


def sum_saved(profile: Profile) -> SavedTotals:
    """Add up what `list_saved` lists."""
    rows = list_saved(profile)
    changes = Counter[int]()
    for row in rows:
        start, end = profile.timeline.spans[row.storage]
        changes[start] += row.bytes
        if end is not None:
            changes[max(end, start)] -= row.bytes
    phases = (call.phase for call in profile.calls if call.phase is not Phase.OPTIMIZER)
    passes = sum(phase is Phase.FORWARD for phase, _ in itertools.groupby(phases))
    return SavedTotals(
        count=len(rows),
        bytes=sum(row.bytes for row in rows),
        most_bytes=max(itertools.accumulate(changes[moment] for moment in sorted(changes)), default=0),
        passes=passes,
    )


def list_modules(profile: Profile) -> list[ModuleRow]:
    """The modules as a tree, each before its children, the model itself first.

    Those that only calls name are there, too, and so are the ones between them and the model.
    """
    kinds = {"": profile.name} | {module.path: module.kind for module in profile.modules}
    for path in {call.module: None for call in profile.calls}:
        for above in reversed(list(paths_above(path))):
            kinds.setdefault(above, "")
    sums = _sum_by_module(profile, known=kinds)
    has_times = profile.step_s is not None
    rows = []
    for path, depth in _walk(kinds):
        sum_of = sums[path]
        rows.append(
            ModuleRow(
                path=path,
                kind=kinds[path],
                depth=depth,
                saved_bytes=sum_of.saved_bytes,
                own_saved_bytes=sum_of.own_saved_bytes,
                parameter_bytes=sum_of.parameter_bytes,
                forward_s=sum_of.seconds[Phase.FORWARD] if has_times else None,
                backward_s=sum_of.seconds[Phase.BACKWARD] if has_times else None,
                recompute_s=sum_of.seconds[Phase.RECOMPUTATION] if has_times else None,
                flops=sum_of.flops,
                calls=sum_of.calls,
            )
        )
    return rows


def list_ops(profile: Profile) -> list[OpRow]:
    """The operators, by what forward leaves of their results for backward, then by what they make at all."""
    saved = Counter[str]()
    made_bytes = Counter[str]()
    seconds: defaultdict[str, float] = defaultdict(float)
    flops = Counter[str]()
    calls = Counter(call.op for call in profile.calls)
    for row in list_saved(profile):
        saved[row.op] += row.bytes
    for made in profile.made():
        made_bytes[profile.calls[made.call].op] += profile.timeline.sizes[made.storage]
    for call in profile.calls:
        seconds[call.op] += call.seconds or 0.0
        flops[call.op] += call.flops
    has_times = profile.step_s is not None
    rows = [
        OpRow(
            op=op,
            calls=count,
            saved_bytes=saved[op],
            made_bytes=made_bytes[op],
            seconds=seconds[op] if has_times else None,
            flops=flops[op],
        )
        for op, count in calls.items()
    ]
    return sorted(rows, key=lambda row: (-row.saved_bytes, -row.made_bytes, row.op))


class _Sums:
    """What is summed of one module."""

    __slots__ = ("calls", "flops", "own_saved_bytes", "parameter_bytes", "saved_bytes", "seconds")

    def __init__(self) -> None:
        self.saved_bytes = self.own_saved_bytes = self.parameter_bytes = self.flops = self.calls = 0
        self.seconds = dict.fromkeys(Phase, 0.0)


def _sum_by_module(profile: Profile, known: Iterable[str]) -> dict[str, _Sums]:
    sums = {path: _Sums() for path in known}
    for row in list_saved(profile):
        sums[row.module].own_saved_bytes += row.bytes
        for path in paths_above(row.module):
            sums[path].saved_bytes += row.bytes
    for storage, size in zip(profile.storages, profile.timeline.sizes, strict=True):
        if storage.category is Category.PARAMETER:
            for path in paths_above(storage.name.rpartition(".")[0]):
                if path in sums:
                    sums[path].parameter_bytes += size
    for call in profile.calls:
        for path in paths_above(call.module):
            sums[path].seconds[call.phase] += call.seconds or 0.0
            if call.phase is Phase.FORWARD:
                sums[path].flops += call.flops
                sums[path].calls += 1
    return sums


def _walk(paths: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Paths as a tree, with their depths; siblings in the order in which they are given."""
    children: defaultdict[str, list[str]] = defaultdict(list)
    known = set(paths)
    for path in paths:
        if path:
            parent = next(above for above in list(paths_above(path))[1:] if above in known)
            children[parent].append(path)
    waiting = [("", 0)]
    while waiting:
        path, depth = waiting.pop()
        yield path, depth
        waiting += [(child, depth + 1) for child in reversed(children[path])]
