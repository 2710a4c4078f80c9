"""What one call of an operator does, and the memory it does it to. Plain data; no torch here, operators are strings."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from recollect._core.decisions import Site

_CROSS_ENTROPY = ("aten.nll_loss_forward", "aten.nll_loss.", "aten.cross_entropy_loss", "aten.linear_cross_entropy")


class Phase(enum.Enum):
    """Which part of the step a call belongs to. RECOMPUTATION: a region runs it again, inside backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    OPTIMIZER = "optimizer"


class Category(enum.Enum):
    """What memory is for.

    GRADIENT: of parameters, and of what else collects them. ACTIVATION: made in forward, kept for backward. LOSS_HEAD:
    activations and temporaries of what comes after the last repeated block, the loss itself included. OFFLOADED:
    activations that are sent elsewhere, while they are here: before they have left, and after they are back. LIBRARY:
    what libraries hold all the time. OTHER: what the process holds on the device all the time, of no part of the step.
    TEMPORARY: all other that calls make.
    """

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER = "optimizer state"
    BUFFER = "buffers"
    INPUT = "inputs"
    ACTIVATION = "activations"
    LOSS_HEAD = "loss head"
    OFFLOADED = "offloaded"
    LIBRARY = "libraries"
    OTHER = "other tensors"
    TEMPORARY = "temporaries"


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
        category: what they are for.
        device: where they are, if it is not the device that is profiled: ``"cpu"``. They then do not count.
        made_at: the call that they came with, if it was seen; None: as `calls` say.
        freed_at: the call at whose start they were gone, if it was seen; None: as `lifetime` says.
        in_variable_until: the call before which the last module's code returned that still had them in a variable; None
            if none was seen to.
    """

    bytes: int
    lifetime: Lifetime = Lifetime.VALUE
    name: str = ""
    category: Category = Category.TEMPORARY
    device: str = ""
    made_at: int | None = None
    freed_at: int | None = None
    in_variable_until: int | None = None


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
        phase: which part of the step it belongs to.
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
        seconds: what it adds to the step; None if nobody measured or estimated it. Host and device work side by side:
            it is its part of the time of the one that is busy for longer, as a share of the whole step.
        device_s: how long the device runs it.
        host_s: how long the host takes to come to it and to launch it; None where the host runs it itself.
        workspace_bytes: memory that it takes and gives back while it runs.
        is_random: whether it draws random numbers.
        is_routing: whether its result chooses.
        is_collective: whether it talks to other processes.
        runs_once: whether it must not be run again in backward, because it has effects or reads what was overwritten.
        forward: index of the forward call whose gradient it computes, or that it runs again; None for others, and where
            nobody knows. Module, source and region are then those of that call.
        nth_pass: for calls of backward, which pass of the step it belongs to, from 0.
        within: number of the call of torch that runs it, as the model's code makes it: calls of forward with the same
            number are one call there; None if nobody knows.
        entered: the outermost module that was called anew between the call of forward before this one and this one, and
            that makes both; None if there is none. So two calls of a module in a row are told apart.
        is_scripted: whether it is made by code that calls functions of TorchScript, whose calls cannot be replayed.
        is_assignment: whether it is part of ``x[index] = y``, which cannot be replayed: it gives nothing back.
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
    device_s: float | None = None
    host_s: float | None = None
    workspace_bytes: int = 0
    is_random: bool = False
    is_routing: bool = False
    is_collective: bool = False
    runs_once: bool = False
    forward: int | None = None
    nth_pass: int = 0
    within: int | None = None
    entered: str | None = None
    is_scripted: bool = False
    is_assignment: bool = False

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


def has_cross_entropy(calls: Iterable[OpCall]) -> bool:
    """Whether a step computes the cross entropy of rows of logits, which can be done in chunks.

    >>> has_cross_entropy([OpCall(op="aten.nll_loss_forward.default")])
    True
    >>> has_cross_entropy([OpCall(op="aten.mse_loss.default")])
    False
    """
    return any(call.op.startswith(_CROSS_ENTROPY) for call in calls)


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
class Received:
    """What a module was called with, as far as its own calls do not show it: a region of it holds that all the same.

    Attributes:
        module: its path.
        call: index of the call before which it was called.
        storages: of the tensors, those that no call of the module saves, or reads before the last one that saves.
        form: shapes of its tensors, flags, and types of the rest; told of modules that are called several times.
    """

    module: str
    call: int
    storages: tuple[int, ...] = ()
    form: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A storage, and the place that makes it first."""

    storage: int
    call: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy of a value to another tier, or back.

    Attributes:
        storage: what leaves, or what it comes back to, which is another storage.
        bytes: that travel, after compression.
        is_out: whether it leaves.
        start: the call before which the copy begins.
        end: the call before which the step may count on it; at least `start`.
        tier: where to, or from: ``"host"``.
    """

    storage: int
    bytes: int
    is_out: bool
    start: int
    end: int
    tier: str = ""
