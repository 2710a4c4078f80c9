"""What was kept of one call, of an operator or a whole block: recomputation gets it instead of running the call.

Held are aliases cut off from the graph, so a kept value is held once however many tensors view it, and no cycle closes.
They share the version counter of what they alias: a write into a kept value is seen, and the call is then run again
in place of being served. Inside the hooks of an enclosing region a kept value is a saved tensor of that region.

What a collective gives may not have arrived when it is kept. It is held by its memory until the region's forward is
over, or until somebody is about to write there, and waited for then: only from then on does its version tell anything,
because the threads of some backends move it when they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from recollect._core.errors import CaptureError, ChangedInputError
from recollect._core.operators import is_wrapper, parts_of
from recollect._core.places import Place
from recollect._core.torch_private.ambient import without_function_modes
from recollect._core.torch_private.dispatch import dispatch_mode_depth, without_dispatch_modes
from recollect._core.torch_private.pytree import Spec, flatten, unflatten
from recollect._recompute.module_state import put_states
from recollect._recompute.rng import Source, put_back, source_of, source_of_cpu, source_of_device
from recollect._recompute.updates import States as ModuleStates
from recollect._recompute.values import digest
from recollect._recompute.way import Hooks

Meta = tuple[Any, ...]
States = list[tuple[Source, Any]]


class KeptCall:
    """The result of one call.

    Attributes:
        label: the operator or block, for errors.
        place: where it was called, if known.
        inputs: shapes and dtypes of the tensors it was given, to tell a recomputation that goes another way.
        states: where the generators it drew from stood afterwards.
        moved: the state of modules that it moved, as it stood afterwards.
        must_rerun: it cannot be served: the call must run again.
        is_written: forward went on to write into the result, and recomputation will too.
        talks: it talked to other processes.
        fills: what is held was written into its arguments, and is to be copied there.
        position: how many tensors the region had saved before this call; -1 where nobody counts.
        is_borrowed: the memory is not the region's own and may be used again without a word, so that a copy is held.
    """

    # Not in slots: most calls set none of these, and there is one object per kept call and step.
    place: Place | None = None
    inputs: list[Meta] | None = None
    states: States | None = None
    moved: ModuleStates | None = None
    must_rerun = is_written = is_borrowed = talks = fills = False
    wait: Callable[[], None] | None = None  # of a collective: returns when the result has arrived
    is_message = False  # between two ranks: may be waited for once only, by whoever sent it
    _parts: Sequence[tuple[Tensor, int]] = ()  # what wrappers wrap, which may be written into past them; with versions
    proof: list[Tensor] | None = None  # copies of what is held, made when it was kept
    line: Any = None  # of the block or operator, among its decisions
    position = -1
    _flags: list[bool] | None = None
    _unpack: Callable[[Any], Tensor] | None = None

    def __init__(self, label: str, leaves: list[Any], spec: Spec | None) -> None:
        self.label, self._leaves, self._spec = label, leaves, spec
        self._versions = [version_of(leaf) for leaf in leaves]

    @classmethod
    def of(cls, label: str, result: Any, alias: Callable[[Tensor], Tensor]) -> KeptCall:
        """Keep a result of any structure."""
        if isinstance(result, Tensor):
            return cls(label, [alias(result)], None)
        leaves, spec = flatten([result])
        return cls(label, [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def look_inside(self, tensors: Iterable[Tensor], alias: Callable[[Tensor], Tensor]) -> None:
        """See writes into what these wrap, past them: `to_local()` of a distributed tensor gives it away."""
        parts = [part for tensor in tensors if is_wrapper(tensor) for part in parts_of(tensor)]
        if parts:
            self._parts = [(alias(part), version_of(part)) for part in parts]

    def arrive(self) -> None:
        """Wait for what is still on its way; from now on versions tell of writes."""
        if self.wait is None:
            return
        wait, self.wait = self.wait, None
        wait()
        self._versions = [version_of(leaf) for leaf in self._leaves]
        self._parts = [(part, version_of(part)) for part, _ in self._parts]

    def settle(self) -> None:
        """Forward is over."""
        if not self.is_message:
            self.arrive()
        if self.is_borrowed and not self.is_written:
            self.copy_out()

    def flags_of(self, result: Any, region: str, plain: tuple[type, ...]) -> list[bool]:
        """Which leaves of a block's result require grad.

        Raises:
            TypeError: the result holds something that is neither a tensor nor a plain value: it may hold tensors.
        """
        leaves, _ = flatten([result])
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, plain)):
                message = (
                    f"region '{region}': the policy keeps {self.label}, but its result holds a "
                    f"{type(leaf).__name__}, in which no tensors can be found.\n"
                    "Return tensors, register the class with torch's pytree, or leave this block to recomputation."
                )
                raise TypeError(message)
        return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]

    def require_grad(self, flags: list[bool]) -> None:
        """Serve leaves that require grad where the result did: above autograd nobody else sets it."""
        if any(flags):
            self._flags = flags

    @property
    def tensors(self) -> list[Tensor]:
        """What is held; nothing where an enclosing region holds it."""
        if self._unpack is not None:
            return []
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    @property
    def is_changed(self) -> bool:
        """Whether a kept value was written into since."""
        if self._unpack is not None:
            return False
        if self.wait is not None:
            self.arrive()
        if self._parts and any(version_of(part) != version for part, version in self._parts):
            return True
        if self._spec is None and type(self._leaves[0]) is Tensor:  # the usual case, written out
            return version_of(self._leaves[0]) != self._versions[0]
        return any(version_of(leaf) != version for leaf, version in zip(self._leaves, self._versions, strict=True))

    def shares_memory(self, storages: Iterable[Any]) -> bool:
        """Whether a kept value lives in one of these storages."""
        own = [part.untyped_storage() for tensor in self.tensors for part in parts_of(tensor)]
        return any(storage is other for storage in storages for other in own)

    def copy_out(self) -> None:
        """Hold copies from now on: the memory is about to be written into."""
        self.arrive()
        self._parts, self.is_borrowed = (), False
        with torch.no_grad():
            self._leaves = [copy_unseen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._versions = [0] * len(self._leaves)

    def prove(self) -> bool:
        """Whether what is held is what it was when it was kept; if not, the copies made then are held from now on."""
        proof, self.proof = self.proof, None
        if proof is None or all(map(has_same_bits, self.tensors, proof)):
            return True
        copies = iter(proof)
        self._leaves = [next(copies) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._versions, self._parts, self.is_written = [version_of(leaf) for leaf in self._leaves], (), True
        return False

    def hand_to(self, hooks: Hooks) -> None:
        """Give the tensors to an enclosing region or an offloader as its saved tensors, and hold only its answers."""
        pack, self._unpack = hooks
        self.must_rerun = self.must_rerun or self._is_written()
        self._parts = ()
        with torch.no_grad(), without_function_modes():
            self._leaves = [_Packed(pack(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def unpack(self) -> None:
        """Get the tensors back from an enclosing region, for one recomputation.

        Before it begins, because the enclosing region may have to recompute, which it cannot beneath an operator. A
        value that the enclosing region writes into is lost: then the call is run again.
        """
        if self._unpack is not None:
            try:
                for leaf in self._leaves:
                    if isinstance(leaf, _Packed):
                        leaf.value = self._unpack(leaf.handle)
            except ChangedInputError:
                self.must_rerun = True

    def let_go(self) -> None:
        """The recomputation is over: what it did not ask for goes."""
        for leaf in self._leaves:
            if isinstance(leaf, _Packed):
                leaf.value = None

    def _is_written(self) -> bool:
        unpack, self._unpack = self._unpack, None
        try:
            return self.is_changed
        finally:
            self._unpack = unpack

    def serve(self, *, is_last: bool = False) -> Any:
        """The result again: other tensors on the same memory; on their own if recomputation will write into them.

        In the last recomputation the aliases themselves are given away, so that they die with their last user.
        """
        leaf = self._leaves[0] if self._spec is None else None
        if type(leaf) is Tensor and not self.is_written:  # the usual case, written out
            value = leaf if is_last else leaf.detach()
            if self._flags is not None:
                value.requires_grad_()
            if self.states is not None or self.moved is not None:
                self._put_states()
            return value
        leaves, is_written = list(self._leaves), self.is_written
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = leaf if is_last and not is_written else leaf.detach()
            elif isinstance(leaf, _Packed):
                assert leaf.value is not None
                value, leaf.value = leaf.value.detach(), None
            else:
                continue
            if self._flags is not None and self._flags[index]:
                value.requires_grad_()
            # Copied with a graph where there is one: a leaf could not be written into.
            leaves[index] = copy_unseen(value) if is_written else value
        self._put_states()
        return leaves[0] if self._spec is None else unflatten(leaves, self._spec)[0]

    def _put_states(self) -> None:
        if self.states is not None:
            put_back(self.states)
        if self.moved is not None:
            put_states(self.moved)


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one shape and dtype and equal to the bit."""
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    with torch.no_grad(), without_dispatch_modes():
        return torch.equal(one, other) or torch.equal(digest(one), digest(other))


def version_of(value: Any) -> int:
    """The version of a tensor; 0 for other values, and for lazy parameters and inference tensors, which have none."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.is_inference():
        return 0
    return value._version  # noqa: SLF001


class _Packed:
    """What an enclosing region gave for a tensor, and the tensor while a recomputation waits for it."""

    __slots__ = ("handle", "value")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.value: Tensor | None = None


def copy_unseen(tensor: Tensor) -> Tensor:
    """A copy that no mode sees being made: an enclosing region counts the function's operators, not ours.

    Where modes look on, they are shown that it exists, as they are of tensors made without an operator: a meter counts
    its memory.
    """
    with without_dispatch_modes():
        copy = tensor.clone()
    if dispatch_mode_depth():
        with torch.no_grad():
            torch.ops.aten.lift_fresh.default(copy)
    return copy


def sources_of(tensors: Sequence[Tensor], values: Sequence[Any]) -> list[Source]:
    """The generators that a call on these tensors draws from: those among its arguments, else their devices' own."""
    kinds = list(map(type, values))  # by type: torch.Generator answers `isinstance` in Python, and slowly
    if torch.Generator in kinds:
        return [source_of(value) for value in values if type(value) is torch.Generator]
    sources: list[Source] = [source_of_cpu()]
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if torch.device in kinds:
        devices.update(value for value in values if type(value) is torch.device and value.type != "cpu")
    for device in devices:
        source = source_of_device(device)
        if source is not None:
            sources.append(source)
    return sources


def read_states(sources: list[Source]) -> States | None:
    """Where generators stand; None while a CUDA graph is being captured, which forbids the question."""
    try:
        return [(source, source.read()) for source in sources]
    except RuntimeError:
        return None


def moved_states(before: States | None, after: States | None) -> States | None:
    """Where those generators stand that moved; None if none did."""
    if before is None or after is None:
        return None
    moved = [now for now, was in zip(after, before, strict=True) if not now[0].same(now[1], was[1])]
    return moved or None


def refuse_capture(region: str, label: str) -> None:
    """Raise, because something that draws is to be kept while a CUDA graph is being captured.

    Raises:
        CaptureError: always.
    """
    message = (
        f"region '{region}': the policy keeps {label}, which draws random numbers, but while a CUDA graph is being "
        "captured, the state of the generator cannot be read.\n"
        "Leave it to recomputation (`Decision.RECOMPUTE`), or capture without this policy."
    )
    raise CaptureError(message)
