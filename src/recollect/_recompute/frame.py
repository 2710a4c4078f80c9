"""One execution of a region: the slots that stand for its saved tensors, and how they are filled again.

Who keeps whom alive (no cycle, so reference counting frees everything)::

    autograd node -> Slot -> Frame -> inputs, function, state around the region
                                Frame - - weak - -> Slot

A slot dies when autograd releases its node, a frame with its last slot, the inputs with the frame. A recomputation
fills every live slot; the values belong to the backward pass that asked. In a pass that frees the graph a value goes
with its slot, when its node is done. In a pass that keeps the graph it is handed over: the slot forgets it and keeps
only a weak reference to its storage, which serves a second read by the same node. See docs/design/engine.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.errors import ChangedInputError, CheckpointError
from recollect._core.torch_private.engine import (
    current_pass,
    get_group,
    pass_is_partial,
    pass_keeps_graph,
    pop_hooks,
    push_hooks,
    when_pass_ends,
)
from recollect._core.torch_private.modes import quietly
from recollect._recompute.oplog import OpLog, describe_tensor

if TYPE_CHECKING:
    from recollect._core.pytree import Arguments
    from recollect._recompute.match import Matcher
    from recollect._recompute.surroundings import Surroundings
    from recollect._recompute.values import Evidence

Meta = tuple[Any, ...]


class StopRecomputation(Exception):  # noqa: N818 (not an error)
    """Ends a recomputation from inside the function once its last needed tensor is made.

    An `Exception`, because only for those does a module call its ``always_call`` hooks, on which module trackers and
    the hooks of nested regions rely. A function that catches it and goes on meets it again at its next saved tensor.
    """


class Slot:
    """Stands for one saved tensor. Autograd's node holds it; it holds the frame."""

    __slots__ = ("__weakref__", "frame", "handed", "value", "version")

    frame: Frame
    value: Tensor | None
    handed: _Handed | None
    version: int  # of the value when it was saved


class _Handed:
    """A value that was handed to a node in a pass that keeps the graph: alive only while the node uses it."""

    __slots__ = ("dtype", "offset", "pass_id", "shape", "storage", "strides", "whole")

    def __init__(self, value: Tensor, pass_id: int) -> None:
        self.pass_id = pass_id
        self.whole: ref[Tensor] | None = None
        if type(value) is not Tensor or value.layout is not torch.strided:
            self.whole = ref(value)
            return
        self.storage = ref(value.untyped_storage())
        self.dtype, self.offset, self.shape, self.strides = (
            value.dtype,
            value.storage_offset(),
            value.shape,
            value.stride(),
        )

    def again(self) -> Tensor | None:
        """The value, if it is still alive."""
        if self.whole is not None:
            return self.whole()
        storage = self.storage()
        if storage is None:
            return None
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.strides)


def read_meta(tensor: Tensor) -> Meta:
    """What the metadata check compares, and the version, which tells writes after saving apart."""
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor._version)  # noqa: SLF001
    except RuntimeError:  # a layout without a shape (nested tensors of the old kind)
        return (None, tensor.dtype, tensor.device, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller of a region chose; the same object serves every call with the same options."""

    preserve: frozenset[str]
    early_stop: bool
    matcher: Matcher
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None
    explain: bool = False


class Inputs:
    """A region's arguments, as recomputation will need them: cut off from the graph.

    Cut off, so that no gradient and no hook of the recomputation reaches the original graph, and so that an input
    written in place later, whose history then leads back to this region, is not held by its own history.

    Inside saved-tensor hooks (an enclosing region, `save_on_cpu`) each tensor is given to those hooks, exactly as
    autograd would give them a saved tensor, and only the answer is held.
    """

    __slots__ = ("_arguments", "_changed", "_held", "_originals", "_requires_grad", "_tensors", "_unpack", "_versions")

    def __init__(
        self,
        arguments: Arguments,
        hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None,
    ) -> None:
        self._arguments = arguments
        held = self._held = arguments.leaves
        # Inference tensors have no version and cannot be saved: they pass like any other value.
        self._tensors = [
            index for index, leaf in enumerate(held) if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]
        self._versions = [held[index]._version for index in self._tensors]  # noqa: SLF001
        self._unpack: Callable[[Any], Tensor] | None = None
        self._originals: list[Tensor] = []
        self._changed: int | None = None
        self._requires_grad = [held[index].requires_grad for index in self._tensors]
        if hooks is not None and self._tensors:
            pack, self._unpack = hooks
            self._originals = [held[index] for index in self._tensors]
            with torch.no_grad():
                for index in self._tensors:
                    held[index] = pack(held[index])
            return
        copies: dict[int, Tensor] = {}
        for index, requires_grad in zip(self._tensors, self._requires_grad, strict=True):
            tensor = held[index]
            if requires_grad and not tensor.is_leaf:
                copy = copies.get(id(tensor))
                if copy is None:
                    copy = copies[id(tensor)] = tensor.detach().requires_grad_()
                held[index] = copy

    @property
    def are_packed(self) -> bool:
        """Whether enclosing hooks hold the tensors, so that they come back as other objects."""
        return self._unpack is not None

    def settle(self) -> None:
        """At exit: see whether the function wrote into tensors that enclosing hooks now hold, and let those go."""
        for index, tensor, version in zip(self._tensors, self._originals, self._versions, strict=False):
            if tensor._version != version:  # noqa: SLF001
                self._changed = index
        self._originals = []

    def materialise(self, region: str) -> list[Any]:
        """Leaves to call the function with again.

        Raises:
            ChangedInputError: a tensor was changed in place since the region was entered.
        """
        held, unpack_input = self._held, self._unpack
        if unpack_input is None:
            for index, version in zip(self._tensors, self._versions, strict=True):
                if held[index]._version != version:  # noqa: SLF001
                    raise ChangedInputError(self._describe_change(region, index))
            return held
        if self._changed is not None:
            raise ChangedInputError(self._describe_change(region, self._changed))
        leaves = list(held)
        for index, requires_grad in zip(self._tensors, self._requires_grad, strict=True):
            tensor = unpack_input(held[index])
            if requires_grad and not (tensor.is_leaf and tensor.requires_grad):
                tensor = tensor.detach().requires_grad_()
            leaves[index] = tensor
        return leaves

    def _describe_change(self, region: str, index: int) -> str:
        return (
            f"region '{region}': {self._arguments.describe(index)} was changed in place after the region was "
            "entered.\n"
            "Recomputation would read the new value. Either the function writes into its own input, or something did "
            "between forward and backward.\n"
            "Use the out-of-place form of that operation, or pass a clone."
        )

    def call(self, fn: Callable[..., Any], leaves: list[Any]) -> Any:
        """Call the function with these leaves."""
        args, kwargs = self._arguments.rebuild(leaves)
        return fn(*args, **kwargs)


class Frame:
    """One execution of a region. Made at entry; `close` at exit; then only its slots hold it."""

    __slots__ = (
        "__weakref__",
        "around",
        "evidence",
        "filled_by",
        "fn",
        "inputs",
        "is_open",
        "keeps_graph",
        "lock",
        "log",
        "metas",
        "name",
        "options",
        "outputs",
        "outputs_seen",
        "recompute_context",
        "slots",
        "stops_early",
        "was_filled",
    )

    def __init__(self, name: str, fn: Callable[..., Any], options: Options) -> None:
        self.name = name
        self.fn: Callable[..., Any] | None = fn
        self.options = options
        self.slots: list[ref[Slot]] = []
        self.metas: list[Meta] = []
        self.is_open = True
        self.was_filled = False
        self.filled_by: Any = None
        self.keeps_graph = False
        self.outputs = 0  # differentiable ones; 0 while unknown
        self.outputs_seen = (-1, 0)  # a pass, and how many outputs it has reached
        self.evidence: Evidence | None = None
        self.log: OpLog | None = None
        self.recompute_context: AbstractContextManager[Any] | None = None
        self.lock = threading.RLock()
        self.inputs: Inputs | None
        self.around: Surroundings
        self.stops_early: bool

    def pack(self) -> Callable[[Tensor], Slot]:
        """The saved-tensor hook of forward: forgets the tensor and gives a slot for it.

        A closure, written out: it runs per saved tensor and takes 0.5 µs, of which 0.25 for the metadata.
        """
        add_slot, add_meta = self.slots.append, self.metas.append

        def pack(tensor: Tensor) -> Slot:
            slot = Slot()
            slot.frame = self
            slot.value = slot.handed = None
            add_slot(ref(slot))
            try:
                add_meta((tensor.shape, tensor.dtype, tensor.device, tensor._version))  # noqa: SLF001
            except RuntimeError:  # a layout without a shape
                add_meta(read_meta(tensor))
            return slot

        return pack

    # Backward.
    def fetch(self, slot: Slot) -> Tensor:
        """Give the value of a slot: the one it has for this pass, the one a node is still using, or a new one."""
        with self.lock:
            pass_id, group = current_pass(), get_group()
            key = pass_id if group is None else group
            if self.inputs is None and slot.value is not None:
                return self._serve(slot, pass_id)
            if key == -1:  # read from outside backward
                return self._recompute_one(slot)
            if self.filled_by == key:
                if slot.value is not None:
                    return self._serve(slot, pass_id)
                handed = slot.handed
                if handed is not None:
                    again = handed.again() if handed.pass_id == pass_id else None
                    if again is not None:
                        return again
                    if handed.pass_id != pass_id:
                        self._refuse_overlap()
                    return self._recompute_one(slot)
            self._recompute_all(key, group)
            return self._serve(slot, pass_id)

    def _refuse_overlap(self) -> None:
        message = (
            f"region '{self.name}': two backward calls of one GraphExecGroup need the same saved tensor.\n"
            "Backward calls in a group share one recomputation, so they must not overlap. Run the second one in a "
            "group of its own."
        )
        raise RuntimeError(message)

    def _serve(self, slot: Slot, pass_id: int) -> Tensor:
        """Give a filled slot's value to whoever asks; where the graph is kept the slot forgets it."""
        value = slot.value
        assert value is not None
        if value._version != slot.version:  # noqa: SLF001
            message = (
                f"region '{self.name}': a saved tensor ({describe_tensor(value)}) was changed in place after it had "
                "been saved for backward, by the function itself.\n"
                "Without the region autograd would refuse this too. Use the out-of-place form of that operation."
            )
            raise ChangedInputError(message)
        if self.keeps_graph:
            slot.value = None
            slot.handed = _Handed(value, pass_id)
        return value

    def _recompute_one(self, slot: Slot) -> Tensor:
        """Recompute for one slot alone and keep nothing: a read outside backward, or of a value already used."""
        index = next(i for i, weak in enumerate(self.slots) if weak() is slot)
        filled = [(live, live.value) for weak in self.slots if (live := weak()) is not None]
        try:
            self._run(last=index, stops_early=True)
            value = self._serve(slot, -1)
        finally:
            for other, before in filled:
                other.value = before
        return value

    def _recompute_all(self, key: Any, group: Any) -> None:
        slots = self.slots
        last = len(slots) - 1
        while slots[last]() is None:
            last -= 1
        if self.was_filled:
            self._empty()
        self.was_filled = True
        self.filled_by = None
        self.keeps_graph = group is not None or pass_keeps_graph()
        self._run(last=last, stops_early=self.stops_early or self.is_open)
        self.filled_by = key
        self._release_if_last()
        if group is not None:
            group.filled(self)
        elif self.inputs is not None:
            when_pass_ends(_Expiry(self, key))

    def _empty(self) -> None:
        for weak in self.slots:
            slot = weak()
            if slot is not None:
                slot.value = slot.handed = None

    def output_runs(self, _gradients: Any) -> None:
        """Called by each of several outputs when a pass reaches it."""
        pass_id = current_pass()
        seen_in, count = self.outputs_seen
        self.outputs_seen = (pass_id, count + 1 if seen_in == pass_id else 1)
        self._release_if_last()

    def _release_if_last(self) -> None:
        """Let the inputs go if this pass has recomputed, frees the graph and reaches every output."""
        if self.keeps_graph or self.filled_by is None or pass_is_partial():
            return
        seen_in, count = self.outputs_seen
        if self.outputs == 1 or (count == self.outputs and seen_in == self.filled_by):
            self._release()

    def _release(self) -> None:
        """Let the inputs go: the pass frees the graph and every slot has its value.

        A slot that the pass does not reach after all (of a tensor leaked from the region) keeps its value.
        """
        self.inputs = self.fn = self.recompute_context = None

    def expire(self) -> None:
        """The pass is over: values that nobody asked for go, unless the inputs are gone already."""
        self.filled_by = None
        if self.inputs is not None:
            self._empty()

    def _run(self, *, last: int, stops_early: bool) -> None:
        """Run the function again up to saved tensor `last` and fill the live slots."""
        if self.inputs is None:
            message = (
                f"region '{self.name}': its inputs were released after an earlier backward that did not "
                "retain the graph.\nPass retain_graph=True to every backward but the last."
            )
            raise CheckpointError(message)
        leaves = self.inputs.materialise(self.name)
        recorder = self.options.matcher.recorder(self, last=last, stops_early=stops_early, leaves=leaves)
        self.around.rerun(self._call, leaves, recorder.pack(), recorder.log)
        recorder.conclude()

    def log_again(self, leaves: list[Any]) -> OpLog:
        """Run the function once more only to log its operators, to the end or to its first error."""
        log = OpLog(self.name)

        def pack(tensor: Tensor) -> Tensor:
            log.note_saved(tensor)
            return tensor.detach() if tensor.requires_grad else tensor

        with suppress(Exception):
            self.around.rerun(self._call, leaves, pack, log)
        return log

    def _call(self, leaves: list[Any], pack: Callable[[Tensor], Any], log: OpLog | None) -> None:
        """Call the function under these hooks; it may be stopped."""
        assert self.inputs is not None
        assert self.fn is not None
        push_hooks(quietly(pack) if self.around.ambient.has_modes else pack, _same)
        try:
            if self.recompute_context is None and log is None:
                self.inputs.call(self.fn, leaves)
            else:
                with self.recompute_context or nullcontext(), log or nullcontext():
                    self.inputs.call(self.fn, leaves)
        except StopRecomputation:
            pass
        finally:
            pop_hooks()


class _Expiry:
    """Callback at the end of a pass; holds the frame weakly, so that it can die before."""

    __slots__ = ("_frame", "_key")

    def __init__(self, frame: Frame, key: Any) -> None:
        self._frame, self._key = ref(frame), key

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None and frame.filled_by == self._key:
            frame.expire()


def unpack(slot: Slot) -> Tensor:
    """Saved-tensor hook of backward: give the slot's tensor, recomputing its region if need be."""
    value = slot.value
    if value is None or slot.frame.keeps_graph or value._version != slot.version:  # noqa: SLF001
        return slot.frame.fetch(slot)
    return value


def _same(tensor: Tensor) -> Tensor:
    """Unpack hook during recomputation: a backward inside the function reads the recomputed tensors as they are."""
    return tensor
