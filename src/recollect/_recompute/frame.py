"""One execution of a region: the handles that stand for its saved tensors, and the pass that fills them again.

Who keeps whom alive (no cycle, so reference counting frees everything)::

    autograd node -> handle (a number), hooks -> Frame -> inputs, function, state around the region
                                                 Frame -> handles

A frame dies when autograd has released the last of its saved tensors, the inputs with the frame. How a frame gets its
values back is its *way* (`Way`): by default the function runs again (`rerun.py`), once per backward pass. The values
belong to the pass that asked. One that is handed to its node is forgotten, because a node reads once. Only Python code
(a custom Function's backward, a hook) can read twice: there, in a pass that frees the graph, the frame keeps the value
until the node is released; in a pass that keeps the graph it keeps a weak reference to the value's storage.
See docs/design/engine.md.
"""

from __future__ import annotations

from _thread import RLock, get_ident  # the class itself: `threading.RLock` is a function around it
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from sys import _getframe
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.authors import Role
from recollect._core.pytree import Arguments
from recollect._core.scope import current_settings
from recollect._core.torch_private.ambient import function_mode_depth, quietly, without_function_modes
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.engine import (
    ENGINE_CODE,
    current_pass,
    pass_is_partial,
    pass_keeps_graph,
    pop_hooks,
    push_hooks,
    top_hooks,
    when_pass_ends,
)
from recollect._core.torch_private.nodes import node_runs_in_part
from recollect._recompute.contexts import Contexts
from recollect._recompute.group import Sharing, current_sharing
from recollect._recompute.handles import FIRST, Handed, is_live
from recollect._recompute.hooks import Meta, observe, quick_meta, read_meta
from recollect._recompute.inputs import Inputs
from recollect._recompute.joins import Joining
from recollect._recompute.memory import Memory
from recollect._recompute.oplog import OpLog
from recollect._recompute.outputs import Outputs, find_nodes
from recollect._recompute.refusals import refuse_changed, refuse_overlap, refuse_used
from recollect._recompute.surroundings import Surroundings
from recollect._recompute.values import Evidence
from recollect._recompute.way import Options, Pack, Producer, Sides, Way

__recollect_role__ = Role.REGION


class Frame:
    """One execution of a region, from `enter` to its last saved tensor; after `leave` only the graph holds it.

    Attributes:
        handles: one for each saved tensor, in the order of saving.
        metas: what the check compares, of each; None: not noted.
        values: by index: what the running pass made, with its version.
        kept: the same in a pass that keeps the graph, before and after a value was handed to a node.
        held: by index: values that are not forgotten at all.
        producer: makes values on demand.
    """

    __slots__ = (
        *("__weakref__", "around", "contexts", "entered", "evidence", "filled_by", "fn", "handles", "has_one_output"),
        *(
            "held",
            "inputs",
            "is_differentiated",
            "is_home",
            "is_open",
            "kept",
            "keeps_graph",
            "lingering",
            "joining",
            "lock",
            "log",
        ),
        *("memory", "metas", "name", "nested", "options", "outputs", "producer", "recompute_context", "stops_early"),
        *("thread", "values", "was_filled", "way"),
    )

    def __init__(  # noqa: PLR0917 (its regions call it, at every call of theirs)
        self,
        name: str,
        fn: Callable[..., Any],
        options: Options,
        way: Way,
        memory: Memory | None = None,
        joining: Joining | None = None,
    ) -> None:
        self.name, self.options, self.way, self.memory, self.joining = name, options, way, memory, joining
        self.fn: Callable[..., Any] | None = fn
        self.handles: list[int] = []
        self.metas: list[Meta | None] = []
        self.values: dict[int, tuple[Tensor, int]] = {}
        self.kept: dict[int, tuple[Tensor, int] | Handed] = {}
        self.held: dict[int, tuple[Tensor, int]] | None = None
        self.lingering: list[int] = []  # indices of values that stay until their nodes, or whoever asked, are released
        self.producer: Producer | None = None
        self.is_open = True
        self.was_filled = self.keeps_graph = False
        # By create_graph: a node of the region then stands in two graphs, and a pass may run it, and read, twice.
        self.is_differentiated = False
        self.filled_by: Any = None
        self.has_one_output = False  # that is differentiable
        self.outputs: Outputs | None = None  # several
        self.evidence: Evidence | None = None
        self.log: OpLog | None = None
        self.contexts: list[AbstractContextManager[Any]] | None = None
        self.entered: Contexts | None = None
        self.recompute_context: AbstractContextManager[Any] | None = None
        self.lock = RLock()
        self.thread, self.is_home = get_ident(), False  # where forward runs; whether recomputation did
        self.inputs: Inputs | None
        self.nested: Any  # notes of the regions inside; not set if there are none

    # Forward: `enter`, then `leave` or `fail`. From module hooks as well as around a call.
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what recomputation will need, and put the hooks in force. Leaves nothing behind if it raises."""
        if function_mode_depth():
            with without_function_modes():
                pack = quietly(self._prepare(args, kwargs))
        else:
            pack = self._prepare(args, kwargs)
        pack.frame = self  # type: ignore[attr-defined]
        push_hooks(pack, self.unpack)
        if self.contexts is not None:
            contexts, self.contexts, self.entered = self.contexts, None, Contexts()
            try:
                self.entered.enter(contexts)
            except BaseException as error:
                self.fail(error)
                raise

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pack:
        """Read everything around the region; gives its pack hook."""
        options, settings = self.options, current_settings()
        self.stops_early = options.early_stop if settings.early_stop is None else settings.early_stop
        arguments = Arguments(args, kwargs)
        # First, because here an enclosing recomputation stops if it needs nothing beyond these inputs.
        joining = self.joining
        joins = joining.joins if joining is not None and joining.takes else None
        self.inputs = Inputs(arguments, top_hooks(True), joins)  # noqa: FBT003
        check = options.matcher.values
        assert self.fn is not None
        around = self.around = Surroundings(
            self.name, self.fn, arguments, options.preserve, exact=check is not None, memory=self.memory
        )
        try:
            sides, pack = self.way.begin(self, arguments)
        except BaseException:
            around.abandon()
            raise
        explains = options.explain if settings.explain is None else settings.explain
        if sides is not None or explains or around.is_captured:
            self._set_contexts(sides, explains=explains)
        arguments.leaves = []
        return pack if check is None and self.log is None else self._observing(pack)

    def _set_contexts(self, sides: Sides | None, *, explains: bool) -> None:
        """What forward runs under."""
        contexts: list[AbstractContextManager[Any]] = []
        if self.around.is_captured:
            contexts.append(self.around.forward())
        if sides is not None:
            forward, self.recompute_context = sides
            contexts.append(forward)
        if explains:
            self.log = OpLog(self.name)
            contexts.append(self.log)
        self.contexts = contexts

    def pack(self) -> Pack:
        """The saved-tensor hook of forward: forgets the tensor and gives a handle for it.

        A closure, written out: it runs per saved tensor. The metadata take 0.25 µs of it.
        """
        add_handle, add_meta, number = self.handles.append, self.metas.append, count(FIRST).__next__

        def pack(tensor: Tensor) -> int:
            try:
                add_meta(quick_meta(tensor))
            except RuntimeError:  # a layout without a shape
                add_meta(read_meta(tensor))
            handle = number()
            add_handle(handle)
            return handle

        return pack

    def _observing(self, pack: Pack) -> Pack:
        """The pack hook of a region that also keeps evidence of values, or a log."""
        check, log = self.options.matcher.values, self.log
        evidence = self.evidence = Evidence(check) if check is not None else None

        def observing(tensor: Tensor) -> Any:
            observe(tensor, evidence, log)
            return pack(tensor)

        return observing

    def leave(self, result: Any) -> None:
        """The function has returned: take the hooks away and keep only what recomputation will need."""
        try:
            try:
                if self.joining is not None and self.joining.gives:
                    self._give(result)
            finally:
                if self.entered is not None:
                    entered, self.entered = self.entered, None
                    entered.leave()
        except BaseException:
            self.around.abandon()
            raise
        finally:
            pop_hooks()
        if function_mode_depth():
            with without_function_modes():
                self._settle(result)
        else:
            self._settle(result)

    def _give(self, result: Any) -> None:
        """Have the result saved like what the function saves: the next region will ask for it."""
        hooks = top_hooks(True)  # noqa: FBT003
        if self.joining is not None and hooks is not None:
            self.joining.give(self, result, hooks[0])

    def give(self, handle: int) -> Tensor:
        """Make a result again for the region that it was given to; it is not held here."""
        return self._fetch_and_take(handle - FIRST, None)[0]

    def fail(self, error: BaseException) -> bool:
        """The function has raised: take everything away. True if the forward context swallowed the exception."""
        self.around.abandon()
        try:
            entered, self.entered = self.entered, None
            return entered is not None and entered.leave(error)
        finally:
            pop_hooks()

    def _settle(self, result: Any) -> None:
        assert self.inputs is not None
        if self.evidence is not None:
            self.evidence.flush()
        self.around.settle()
        self.is_open = False
        if self.handles:
            self._note_outputs(result)
        self.inputs.settle()
        self.way.settle(self)

    def _note_outputs(self, result: Any) -> None:
        """Find out how a backward pass will show that it reaches all of the region's saved tensors."""
        if isinstance(result, Tensor):
            self.has_one_output = True
            return
        assert self.inputs is not None
        nodes = find_nodes(result, self.inputs)
        self.has_one_output = len(nodes) == 1
        if len(nodes) > 1:
            self.outputs = Outputs(nodes, self._release_if_last)

    # Backward. Values are known by their index, the handle's distance from the first: a handle among them would live.
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
                    return self.way.read(self, index)
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
        return self._left_over(index) if self.inputs is None else self.way.read(self, index)

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
            self.way.refill(self, is_last=is_last)
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
        if self.keeps_graph or self.is_differentiated or pass_is_partial():
            return False
        return self.has_one_output or (self.outputs is not None and self.outputs.are_reached())

    def _release_if_last(self) -> None:
        """Let the inputs go if this pass has recomputed and no other will."""
        if self.filled_by is not None and self._is_last():
            self._release()

    def _release(self) -> None:
        """Let the inputs go. A value that the pass does not reach after all (of a tensor that leaked out) stays."""
        self.inputs = self.fn = self.recompute_context = None
        if self.producer is not None:
            self.producer.be_last()

    def expire(self) -> None:
        """The pass is over: values that nobody asked for go, unless the inputs are gone already."""
        self.filled_by = None
        if self.inputs is not None:
            self._empty()

    def held_tensors(self) -> list[tuple[str, Any]]:
        """What the frame itself holds: what each is, and the tensor or what enclosing hooks gave for it."""
        found = [] if self.inputs is None else self.inputs.held_tensors()
        return found + self.way.held(self)


class Expiry:
    """Callback at the end of a pass; holds the frame weakly, so that it can die before."""

    __slots__ = ("_frame", "_key")

    def __init__(self, frame: Frame, key: Any) -> None:
        self._frame, self._key = ref(frame), key

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None and frame.filled_by == self._key:
            frame.expire()
