"""What of a joint graph never reaches memory, because a compiler fuses it into the kernels that read it.

A pointwise value that no product, convolution or attention reads is written to memory only if that is worth it: it is
not where all who read it come before the next of these, nor where it can be made from no more bytes than it has. Its
readers then read what it is made of. So a log-softmax in float32 takes nothing beside the logits in bfloat16, a norm
nothing beside its input, while the sums of a residual stream stay. In backward what is written pointwise takes the
place of something as large that nobody reads any more: the gradients of logits that of the logits.

This is a guess at what Inductor does, made before it runs: its own limits on the size of kernels are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from recollect._core.calls import Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import Profile

_REDUCING = ("mean", "sum", "var", "std", "amax", "amin", "norm", "prod", "argmax", "argmin", "logsumexp", "softmax")
_APART = (
    "embedding",
    "sort",
    "topk",
    "scatter",
    "index_put",
    "cumsum",
    "cumprod",
    "bernoulli",
    "rand",
    "nonzero",
    "unique",
    "all_",
)


def fuse(profile: Profile, kept: Collection[int] = ()) -> tuple[Profile, frozenset[int]]:
    """The step as a compiler will run it, and the storages that it writes nowhere, which then have no bytes.

    Args:
        profile: of a joint graph.
        kept: storages that are written whatever is said here, because they are kept for backward.
    """
    fusing = _Fusing(profile, frozenset(kept))
    calls = tuple(map(fusing.read, range(len(profile.calls))))
    gone = frozenset(fusing.sources)
    storages = tuple(
        replace(storage, bytes=0) if number in gone else storage for number, storage in enumerate(profile.storages)
    )
    found = replace(profile, storages=storages, calls=_write_in_place(storages, calls), saved=())
    return replace(found, saved=tuple(find_saved(found))), gone


def _write_in_place(storages: Sequence[Storage], calls: Sequence[OpCall]) -> tuple[OpCall, ...]:
    """Let calls of backward write into what they are the last to read, if it is as large as what they give."""
    last = {storage: number for number, call in enumerate(calls) for storage in call.reads}
    place: dict[int, int] = {}
    found = []
    for number, call in enumerate(calls):
        made = {value.storage for value in call.outputs} - call.reads
        if call.phase is Phase.BACKWARD and len(made) == 1 and is_pointwise(call):
            (own,) = made
            if storages[own].bytes and storages[own].lifetime is Lifetime.VALUE:
                free = (place.get(at, at) for at in sorted(call.reads) if last[at] == number)
                fits = (at for at in free if _is_same_size(storages[at], storages[own]))
                place[own] = next(fits, own)
        found.append(replace(call, inputs=_move(call.inputs, place), outputs=_move(call.outputs, place)))
    return tuple(found)


def _is_same_size(one: Storage, other: Storage) -> bool:
    return one.bytes == other.bytes and one.lifetime is other.lifetime


def _move(values: tuple[Value, ...], place: dict[int, int]) -> tuple[Value, ...]:
    return tuple(replace(value, storage=place[value.storage]) if value.storage in place else value for value in values)


def find_saved(profile: Profile) -> Iterator[Saved]:
    """What plain autograd keeps: each storage of forward that backward reads."""
    makers = {made.storage: made.call for made in profile.made() if made.call < profile.forward_count}
    seen: set[int] = set()
    for number in range(profile.forward_count, len(profile.calls)):
        for storage in sorted(profile.calls[number].reads - seen):
            seen.add(storage)
            if storage in makers:
                yield Saved(storage=storage, by=makers[storage], reader=number)


def is_view(call: OpCall) -> bool:
    """Whether a call gives nothing but what was there."""
    read = {value.storage for value in call.inputs}
    return all(value.storage in read for value in call.outputs) and not call.writes


def is_pointwise(call: OpCall) -> bool:
    """Whether a compiler fuses what a call gives into what reads it."""
    return not (has_kernel(call) or is_reducing(call) or is_view(call))


def is_reducing(call: OpCall) -> bool:
    """Whether it reads pointwise and gives fewer numbers, which are written to memory.

    The name is that of the whole, of which a piece may give as many as it reads: a softmax less its largest number.
    """
    most = max((math.prod(value.shape) for value in call.inputs), default=0)
    gives_fewer = all(math.prod(value.shape) < most for value in call.outputs)
    return gives_fewer and any(word in _short_name(call) for word in _REDUCING)


def has_kernel(call: OpCall) -> bool:
    """Whether it finds its operands in memory and leaves its results there."""
    special = call.is_random or call.is_routing or call.is_collective or call.runs_once or bool(call.writes)
    name = _short_name(call)
    return bool(call.flops) or special or "attention" in name or any(word in name for word in _APART)


def _short_name(call: OpCall) -> str:
    return call.op.split(".")[1] if call.op.count(".") > 1 else call.op


@dataclass(slots=True)
class _Fusing:
    """Goes through the calls in order.

    Attributes:
        profile: the step.
        kept: what is written anyway.
        sources: for each storage that is not written, what it is made of.
    """

    profile: Profile
    kept: frozenset[int]
    sources: dict[int, tuple[Value, ...]] = field(default_factory=dict)
    _readers: dict[int, list[int]] = field(default_factory=dict)
    _kernels: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = 0
        for number, call in enumerate(self.profile.calls):
            count += has_kernel(call)
            self._kernels.append(count)
            for storage in call.reads:
                self._readers.setdefault(storage, []).append(number)

    def read(self, number: int) -> OpCall:
        """A call with all that its kernel reads; what it makes may not be written from here on."""
        call = self.profile.calls[number]
        reads = {value.storage: value for value in call.inputs}
        for value in call.inputs:
            for source in self.sources.get(value.storage, ()):
                reads.setdefault(source.storage, source)
        made = {value.storage: value for value in call.outputs if value.storage not in call.reads}
        if len(made) == 1 and is_pointwise(call):
            (storage,) = made
            sources = tuple(value for at, value in reads.items() if at not in self.sources)
            if self._is_fused(storage, number, sources):
                self.sources[storage] = sources
        more = tuple(value for at, value in reads.items() if at not in call.reads)
        return replace(call, inputs=(*call.inputs, *more)) if more else call

    def _is_fused(self, storage: int, maker: int, sources: tuple[Value, ...]) -> bool:
        if storage in self.kept or self.profile.storages[storage].lifetime is not Lifetime.VALUE:
            return False
        calls = self.profile.calls
        readers = [number for number in self._readers.get(storage, ()) if not is_view(calls[number])]
        if not readers or any(has_kernel(calls[number]) for number in readers):
            return False
        is_near = self._kernels[readers[-1]] == self._kernels[maker] and calls[maker].phase is calls[readers[-1]].phase
        return is_near or sum(value.bytes for value in sources) <= self.profile.storages[storage].bytes
