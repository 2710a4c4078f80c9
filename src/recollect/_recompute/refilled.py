"""What backward asks a region for: values that a pass makes when it first asks, hands over once, and takes with it.

The values belong to the pass that asked. One that is handed to its node is forgotten, because a node reads once. Only
Python code (a custom Function's backward, a hook) can read twice: there, in a pass that frees the graph, the value
stays until the node is released; in a pass that keeps the graph, a weak reference to its storage does.
See docs/design/engine.md.
"""

from __future__ import annotations

from _thread import RLock, get_ident  # the class itself: `threading.RLock` is a function around it
from abc import ABC, abstractmethod
from sys import _getframe
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.authors import Role
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.engine import (
    ENGINE_CODE,
    current_pass,
    pass_is_whole,
    pass_keeps_graph,
    when_pass_ends,
)
from recollect._core.torch_private.nodes import node_runs_in_part
from recollect._recompute.group import Sharing, current_sharing
from recollect._recompute.handles import FIRST, Handed, is_live
from recollect._recompute.outputs import Outputs
from recollect._recompute.refusals import refuse_changed, refuse_overlap, refuse_used

if TYPE_CHECKING:
    from recollect._recompute.inputs import Inputs
    from recollect._recompute.way import Producer

__recollect_role__ = Role.REGION


class Refilled(ABC):
    """Saved tensors that were forgotten, and the passes that have them filled again; a frame, seen from backward.

    Attributes:
        handles: one for each saved tensor, in the order of saving.
        inputs: what recomputation starts from; None once they were let go, because no other will follow.
        values: by index: what the running pass made, with its version.
        kept: the same in a pass that keeps the graph, before and after a value was handed to a node.
        held: by index: values that are not forgotten at all.
        lingering: indices of values that stay until their nodes, or whoever asked, are released.
        producer: makes values on demand.
        is_differentiated: by create_graph: a node of the region then stands in two graphs, and a pass may run it, and
            read, twice.
        has_one_output: that is differentiable; `outputs` are several.
        thread: where forward runs; `is_home` says whether recomputation did.
    """

    __slots__ = (
        *("__weakref__", "filled_by", "handles", "has_one_output", "held", "inputs", "is_differentiated", "is_home"),
        *("kept", "keeps_graph", "lingering", "lock", "name", "outputs", "producer", "thread", "values", "was_filled"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.handles: list[int] = []
        self.inputs: Inputs | None
        self.values: dict[int, tuple[Tensor, int]] = {}
        self.kept: dict[int, tuple[Tensor, int] | Handed] = {}
        self.held: dict[int, tuple[Tensor, int]] | None = None
        self.lingering: list[int] = []
        self.producer: Producer | None = None
        self.was_filled = self.keeps_graph = self.is_differentiated = self.has_one_output = self.is_home = False
        self.outputs: Outputs | None = None
        self.filled_by: Any = None
        self.lock = RLock()
        self.thread = get_ident()

    @abstractmethod
    def refill(self, *, is_last: bool) -> None:
        """A pass asks for the first time: fill `values`, or set `producer` to fill them on demand."""

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """Make one saved tensor alone and keep nothing: a read outside backward, or of a value already used."""

    @abstractmethod
    def drop_inputs(self) -> None:
        """No recomputation will follow: let go of the inputs, and of whatever else only that needs."""

    # Values are known by their index, the handle's distance from the first: a handle among them would live.

    @untraced
    def unpack(self, handle: int) -> Tensor:
        """Saved-tensor hook of backward: give the handle's tensor, recomputing the region if need be.

        Written out for what is usual, because it runs per saved tensor: the value is there, and a C++ node asks, which
        has no Python caller but the engine's, or none on the engine's own threads. On the thread that ran forward,
        which is Python's, a depth of one is there: 0.2 µs less than `f_back`, measured.
        """
        found = self.values.pop(handle - FIRST, None)
        if found is not None and not self.lingering and self.held is None:
            value, version = found
            try:
                is_engine = _getframe(1).f_code is ENGINE_CODE if self.is_home else _getframe().f_back is None
            except ValueError:  # filled there, read by a device's thread
                is_engine = True
            if is_engine and value._version == version:  # noqa: SLF001
                return value
        return self._unpack(handle - FIRST, found)

    def _unpack(self, index: int, found: tuple[Tensor, int] | None) -> Tensor:
        """The same for whatever else: `unpack` must be its caller."""
        if self.lingering:
            self._drop_released()
        if found is None or found[0]._version != found[1]:  # noqa: SLF001
            value, found = self._fetch_and_take(index, found)
        else:
            value = found[0]
        caller = _getframe(1).f_back
        if caller is not None and caller.f_code is not ENGINE_CODE:
            if found is not None:
                self.values[index] = found
            self.lingering.append(index)
        elif self.held is not None and not pass_keeps_graph():
            self.held.pop(index, None)
        return value

    def _fetch_and_take(self, index: int, found: tuple[Tensor, int] | None) -> tuple[Tensor, tuple[Tensor, int] | None]:
        """A value that is not at hand, and how it stood in `values`, from where it is taken."""
        if found is not None:
            self.values[index] = found
        return self.fetch(index), self.values.pop(index, None)

    def give(self, handle: int) -> Tensor:
        """Make a result again for the region that it was given to; it is not held here."""
        return self._fetch_and_take(handle - FIRST, None)[0]

    def _drop_released(self) -> None:
        """Values linger while somebody who has the handle may read them again; then they go."""
        remaining = []
        for index in self.lingering:
            if is_live(self.handles, index):
                remaining.append(index)
                continue
            for table in (self.values, self.kept, self.held or {}):
                table.pop(index, None)
        self.lingering = remaining

    def fetch(self, index: int) -> Tensor:  # noqa: PLR0911 (one for each place where the value may be)
        """Give a saved tensor: the one there is for this pass, the one a node is still using, or a new one."""
        with self.lock:
            if self.held is not None and index in self.held:
                return self._checked(self.held[index])
            pass_id, group = current_pass(), current_sharing()
            key = pass_id if group is None else group
            if pass_id == -1 or self.filled_by != key:
                if self.inputs is None:
                    return self._left_over(index)
                if pass_id == -1:  # read from outside backward
                    return self.read(index)
                self._begin_pass(key, group)
            found = self.values.get(index)
            if found is not None:
                return self._checked(found)
            if index in self.kept:
                return self._fetch_kept(index, pass_id, group)
            if self.producer is not None:
                return self._make(self.producer, index, pass_id)
            return self._make_one(index)

    def _make(self, producer: Producer, index: int, pass_id: int) -> Tensor:
        """Have a value made for this pass."""
        value = producer.take(index)
        if value is None:  # it is among those that were filled in
            return self._fetch_kept(index, pass_id, current_sharing()) if self.keeps_graph else self.values[index][0]
        if self.keeps_graph:
            return self._hand_over(index, value, value._version, pass_id)  # noqa: SLF001
        self.values[index] = (value, value._version)  # noqa: SLF001
        return value

    def _make_one(self, index: int) -> Tensor:
        return self._left_over(index) if self.inputs is None else self.read(index)

    def _fetch_kept(self, index: int, pass_id: int, group: Sharing | None) -> Tensor:
        """Give a value where the graph is kept; it goes, unless a call of the group will need it again."""
        kept = self.kept.get(index)
        if isinstance(kept, Handed):
            again = kept.again() if kept.pass_id == pass_id else None
            if again is not None:
                return again
            if group is None or kept.pass_id == pass_id:
                return self._make_one(index)
            if group.refuses_overlap:
                refuse_overlap(self.name)
            if self.producer is not None:
                return self._make_one(index)
            self._begin_pass(group, group)
            kept = self.kept.get(index)
            assert not isinstance(kept, Handed)
        if kept is None:
            return self._make_one(index)
        return self._hand_over(index, self._checked(kept), kept[1], pass_id)

    def _hand_over(self, index: int, value: Tensor, version: int, pass_id: int) -> Tensor:
        if current_sharing() is not None and node_runs_in_part():  # a later call of the group needs it again
            self.kept[index] = (value, version)
            self.lingering.append(index)
        else:
            self.kept[index] = Handed(value, pass_id)
        return value

    def _left_over(self, index: int) -> Tensor:
        """The value of a region that was let go, because all of its outputs were done."""
        found = self.values.get(index)
        if found is None:
            refuse_used(self.name)
        return self._checked(found)

    def _checked(self, found: tuple[Tensor, int]) -> Tensor:
        """A recomputed value, if it is still what was saved."""
        value, version = found
        if value._version != version:  # noqa: SLF001
            refuse_changed(self.name, value)
        return value

    def _begin_pass(self, key: Any, group: Sharing | None) -> None:
        """The first request of a pass: make its values, or what makes them."""
        if self.was_filled:
            self._empty()
        self.was_filled = True
        self.filled_by = None
        self.is_home = get_ident() == self.thread
        self.keeps_graph = group is not None or pass_keeps_graph()
        self.is_differentiated = self.is_differentiated or torch.is_grad_enabled()
        is_last = self._is_last()
        try:
            self.refill(is_last=is_last)
        except BaseException:
            self._empty()  # else the next pass would take what a failed recomputation made
            raise
        self.filled_by = key
        if self.keeps_graph:
            # The frame outlives its nodes' runs: each value must be handed over, see `fetch`.
            self.kept.update(self.values)
            self.values.clear()
        elif is_last:
            self._release()
        if group is not None:
            group.filled(self)
        elif self.inputs is not None:
            when_pass_ends(Expiry(self, key))

    def _empty(self) -> None:
        self.values.clear()
        self.kept.clear()
        self.lingering.clear()
        self.producer = None

    def _is_last(self) -> bool:
        """Whether the running pass frees the graph and reaches every output: no recomputation follows its own."""
        if self.keeps_graph or self.is_differentiated or not pass_is_whole():
            return False
        return self.has_one_output or (self.outputs is not None and self.outputs.are_reached())

    def release_if_last(self) -> None:
        """Let the inputs go if this pass has recomputed and no other will."""
        if self.filled_by is not None and self._is_last():
            self._release()

    def _release(self) -> None:
        """Let the inputs go. A value that the pass does not reach after all (of a tensor that leaked out) stays."""
        self.drop_inputs()
        if self.producer is not None:
            self.producer.be_last()

    def expire(self) -> None:
        """The pass is over: values that nobody asked for go, unless the inputs are gone already."""
        self.filled_by = None
        if self.inputs is not None:
            self._empty()


class Expiry:
    """Callback at the end of a pass; holds the frame weakly, so that it can die before."""

    __slots__ = ("_frame", "_key")

    def __init__(self, frame: Refilled, key: Any) -> None:
        self._frame, self._key = ref(frame), key

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None and frame.filled_by == self._key:
            frame.expire()
