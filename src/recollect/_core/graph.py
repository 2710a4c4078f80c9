"""Profile: what a training step does, operator by operator. Plain data; no torch here, operators are strings."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from recollect._core.decisions import Site
from recollect._core.documents import read_document, write_document

_VERSION = 1


class Phase(enum.Enum):
    """Which half of the step a call belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Lifetime(enum.Enum):
    """How long a storage is there.

    STEP: before the step and after it, as parameters, buffers and the step's own inputs are. GIVEN: handed to backward
    at its start, and freed after its last use, as the gradients of the outputs are. RETURNED: from the call that makes
    it to the end, as results and gradients are. VALUE: until its last use.
    """

    STEP = "step"
    GIVEN = "given"
    RETURNED = "returned"
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bytes that tensors share.

    Attributes:
        bytes: how many.
        lifetime: how long they are there.
        name: of the parameter, buffer or argument, if it is one.
    """

    bytes: int
    lifetime: Lifetime = Lifetime.VALUE
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor, as a window on a storage: two with one storage are aliases.

    Attributes:
        storage: index into the profile's storages.
        shape: of the tensor, symbolic sizes by their hint.
        dtype: as torch writes it without its prefix.
        bytes: of its elements, which may be fewer or more than the storage's.
    """

    storage: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an operator.

    Attributes:
        op: the operator, overload included.
        phase: which half of the step it belongs to.
        inputs: what it reads.
        outputs: what it gives; one on a storage that was there before is a view or was written in place.
        writes: storages that were there before and that it writes into.
        region: name of the checkpointed region; ``""`` outside of any.
        module: path of the calling module.
        scopes: names of the `recollect.region` blocks around it.
        call: which call of this operator in the region, from 0.
        first_output: number of its first output, where a compiler took one operator apart into several calls.
        source: the line of the user's code, as ``"model.py:41"``.
        flops: floating-point operations.
        seconds: how long it takes; None if nobody measured or estimated it.
        workspace_bytes: memory that it takes and gives back while it runs.
        is_random: whether it draws random numbers.
        is_routing: whether its result chooses.
        is_collective: whether it talks to other processes.
        runs_once: whether it must not be run again in backward, because it has effects or reads what was overwritten.
    """

    op: str
    phase: Phase = Phase.FORWARD
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    writes: tuple[int, ...] = ()
    region: str = ""
    module: str = ""
    scopes: tuple[str, ...] = ()
    call: int = 0
    first_output: int = 0
    source: str = ""
    flops: int = 0
    seconds: float | None = None
    workspace_bytes: int = 0
    is_random: bool = False
    is_routing: bool = False
    is_collective: bool = False
    runs_once: bool = False

    @property
    def reads(self) -> frozenset[int]:
        """The storages that must be there when it runs, those it writes into included."""
        return frozenset(value.storage for value in self.inputs) | frozenset(self.writes)

    def site(self, output: int = 0) -> Site:
        """Where one of its outputs is made, as policies and plans see it."""
        value = self.outputs[output] if self.outputs else Value(storage=0)
        return Site(
            region=self.region,
            op=self.op,
            call=self.call,
            output=self.first_output + output,
            module=self.module,
            scopes=self.scopes,
            shape=value.shape,
            dtype=value.dtype,
            bytes=value.bytes,
            flops=self.flops,
            is_random=self.is_random,
            is_routing=self.is_routing,
            is_collective=self.is_collective,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A storage that one call keeps for backward.

    Attributes:
        storage: what is kept.
        by: index of the forward call whose gradient needs it.
        reader: index of the first backward call that reads it; None if none does, and it is held all the same.
    """

    storage: int
    by: int
    reader: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A storage, and the place that makes it first."""

    storage: int
    call: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a step does, in the order in which it does it. Compared by value.

    Attributes:
        storages: all memory that tensors of the step live in; others refer to them by index.
        calls: the operators, forward first.
        saved: what forward keeps for backward, call by call.
        device: what it was taken on or for, as ``"NVIDIA H200"``.

    Raises:
        ValueError: a storage or call that is referred to is not there, or forward goes on after backward began.

    >>> relu = OpCall(op="aten.relu.default", inputs=(Value(storage=0),), outputs=(Value(storage=1),))
    >>> gradient = OpCall(op="aten.threshold_backward.default", phase=Phase.BACKWARD, inputs=(Value(storage=1),))
    >>> storages = (Storage(bytes=64, lifetime=Lifetime.STEP), Storage(bytes=64))
    >>> step = Profile(storages=storages, calls=(relu, gradient), saved=(Saved(storage=1, by=0, reader=1),))
    >>> Profile.from_json(step.to_json()) == step
    True
    >>> [step.calls[made.call].op for made in step.made()]
    ['aten.relu.default']
    """

    storages: tuple[Storage, ...]
    calls: tuple[OpCall, ...]
    saved: tuple[Saved, ...] = ()
    device: str = ""

    def __post_init__(self) -> None:
        for number, call in enumerate(self.calls):
            used = {*call.reads, *(value.storage for value in call.outputs)}
            _check_indices(used, len(self.storages), f"call {number} ({call.op})", "storage")
            if number and call.phase is Phase.FORWARD and self.calls[number - 1].phase is Phase.BACKWARD:
                message = f"call {number} ({call.op}) is of forward and comes after one of backward"
                raise ValueError(message)
        for edge in self.saved:
            _check_indices({edge.storage}, len(self.storages), f"{edge}", "storage")
            _check_indices({edge.by, edge.reader or 0}, len(self.calls), f"{edge}", "call")

    @property
    def forward_count(self) -> int:
        """How many calls are of forward; the call of this index is backward's first."""
        return bisect.bisect_left(self.calls, True, key=lambda call: call.phase is Phase.BACKWARD)  # noqa: FBT003

    def made(self) -> Iterator[Made]:
        """Each storage that a call makes, with the first call and output on it, in order."""
        there = {index for index, storage in enumerate(self.storages) if storage.lifetime in _THERE_BEFORE}
        for number, call in enumerate(self.calls):
            for output, value in enumerate(call.outputs):
                if value.storage not in there:
                    there.add(value.storage)
                    yield Made(storage=value.storage, call=number, output=output)

    def to_json(self) -> str:
        """The profile as text that `from_json` reads."""
        return write_document(self, kind="profile", version=_VERSION)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            ValueError: the text is none, or of a later version.
        """
        return read_document(text, cls, kind="profile", version=_VERSION)


_THERE_BEFORE = (Lifetime.STEP, Lifetime.GIVEN)


def _check_indices(indices: set[int], count: int, where: str, noun: str) -> None:
    for index in indices:
        if not 0 <= index < count:
            message = f"{where} refers to {noun} {index}, and there are {count}"
            raise ValueError(message)
