"""One execution of a region: the slots that stand for its saved tensors, and how they are filled again.

Who keeps whom alive (no cycle, so reference counting frees everything)::

    autograd node -> Slot -> Frame -> inputs, function, state around the region
                                Frame - - weak - -> Slot

A slot dies when autograd releases its node, a frame with its last slot, the inputs with the frame. A recomputation
fills every live slot; the values belong to the backward pass that asked. A slot forgets its value when it hands it to
its node, which reads it once. Only Python code (a custom Function's backward, a hook) can read twice: there, in a pass
that frees the graph, the slot keeps the value and goes with its node; in a pass that keeps the graph it keeps a weak
reference to the value's storage. See docs/design/engine.md.
"""

from __future__ import annotations

from _thread import RLock, get_ident  # the class itself: `threading.RLock` is a function around it
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from sys import _getframe
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from recollect._core.authors import Role
from recollect._core.errors import ChangedInputError, CheckpointError
from recollect._core.pytree import Arguments
from recollect._core.scope import current_settings, mark_last
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
from recollect._core.torch_private.pytree import is_container, tree_leaves
from recollect._recompute.contexts import Contexts
from recollect._recompute.group import Sharing, current_sharing
from recollect._recompute.inputs import Inputs
from recollect._recompute.oplog import OpLog, describe_tensor
from recollect._recompute.slots import Handed, Slot, claim
from recollect._recompute.surroundings import Surroundings
from recollect._recompute.values import Evidence

if TYPE_CHECKING:
    from recollect._recompute.match import Matcher

__recollect_role__ = Role.REGION

Meta = tuple[Any, ...]


class StopRecomputation(Exception):  # noqa: N818 (not an error)
    """Ends a recomputation from inside the function once its last needed tensor is made.

    An `Exception`, because only for those does a module call its ``always_call`` hooks, on which module trackers and
    the hooks of nested regions rely. A function that catches it and goes on meets it again at its next saved tensor.
    """


def observe(tensor: Tensor, evidence: Evidence | None, log: OpLog | None) -> None:
    """A tensor is being saved: tell the log, then keep evidence."""
    if log is not None:
        log.note_saved(tensor)
    if evidence is not None:
        evidence.note(tensor)


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


class Frame:
    """One execution of a region, from `enter` to its last slot; after `leave` only its slots hold it."""

    __slots__ = (
        "__weakref__",
        "around",
        "contexts",
        "entered",
        "evidence",
        "filled_by",
        "fn",
        "inputs",
        "is_differentiated",
        "is_home",
        "is_open",
        "keeps_graph",
        "lock",
        "log",
        "metas",
        "name",
        "nested",
        "options",
        "outputs",
        "outputs_seen",
        "recompute_context",
        "slots",
        "stops_early",
        "thread",
        "was_filled",
    )

    def __init__(self, name: str, fn: Callable[..., Any], options: Options) -> None:
        self.name = name
        self.fn: Callable[..., Any] | None = fn
        self.options = options
        self.slots: list[ref[Slot]] = []
        self.metas: list[Meta | None] = []  # None: not noted
        self.is_open = True
        self.was_filled = self.keeps_graph = False
        # By create_graph: a node of the region then stands in two graphs, and a pass may run it, and read, twice.
        self.is_differentiated = False
        self.filled_by: Any = None
        self.outputs = 0  # differentiable ones; 0 while unknown
        self.outputs_seen = (-1, 0)  # a pass, and how many outputs it has reached
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
        claim(pack, self)
        push_hooks(pack, unpack)
        if self.contexts is not None:
            contexts, self.contexts, self.entered = self.contexts, None, Contexts()
            try:
                self.entered.enter(contexts)
            except BaseException as error:
                self.fail(error)
                raise

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
        """Read everything around the region; gives its pack hook."""
        name, options, settings = self.name, self.options, current_settings()
        self.stops_early = options.early_stop if settings.early_stop is None else settings.early_stop
        arguments = Arguments(args, kwargs)
        # First, because here an enclosing recomputation stops if it needs nothing beyond these inputs.
        self.inputs = Inputs(arguments, top_hooks(True))  # noqa: FBT003
        exact = options.matcher.values is not None
        assert self.fn is not None
        around = self.around = Surroundings(name, self.fn, arguments, options.preserve, exact=exact)
        try:
            self.contexts = self._make_contexts(arguments, explain=settings.explain)
        except BaseException:
            around.abandon()
            raise
        arguments.leaves = []
        return self._observing(self.pack()) if exact or self.log is not None else self.pack()

    def _make_contexts(self, arguments: Arguments, *, explain: bool | None) -> list[AbstractContextManager[Any]] | None:
        """What forward runs under."""
        options, around = self.options, self.around
        contexts: list[AbstractContextManager[Any]] = []
        if around.is_captured:
            contexts.append(around.forward())
        sides = self._make_sides(arguments)
        if sides is not None:
            forward, self.recompute_context = sides
            contexts.append(forward)
        if options.explain if explain is None else explain:
            self.log = OpLog(self.name)
            contexts.append(self.log)
        return contexts or None

    def _make_sides(
        self, arguments: Arguments
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
        """What the region's options put around forward and around recomputation."""
        del arguments
        return None if self.options.contexts is None else _checked_contexts(self.name, self.options.contexts())

    def _observing(self, pack: Callable[[Tensor], Slot]) -> Callable[[Tensor], Slot]:
        """The pack hook of a region that also keeps evidence of values, or a log."""
        check, log = self.options.matcher.values, self.log
        evidence = self.evidence = Evidence(check) if check is not None else None

        def observing(tensor: Tensor) -> Slot:
            observe(tensor, evidence, log)
            return pack(tensor)

        return observing

    def leave(self, result: Any) -> None:
        """The function has returned: take the hooks away and keep only what recomputation will need."""
        try:
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
        self.inputs.settle()
        self.is_open = False
        if self.slots:
            self._count_outputs(result)

    def _count_outputs(self, result: Any) -> None:
        """Find out how a backward pass will show that it reaches all of the region's saved tensors.

        With one differentiable output, the first saved tensor that is asked for shows it. With several, each
        output's node reports when a pass runs it.
        """
        if type(result) is Tensor:
            self.outputs = 1
            return
        leaves = tree_leaves(result) if is_container(type(result)) else ()
        nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        self.outputs = len(nodes)
        if self.outputs > 1:
            report = WeakMethod(self.output_runs)
            for node in nodes:
                node.register_prehook(lambda gradients: reach(gradients) if (reach := report()) is not None else None)

    def pack(self) -> Callable[[Tensor], Slot]:
        """The saved-tensor hook of forward: forgets the tensor and gives a slot for it.

        A closure, written out: it runs per saved tensor. The metadata take 0.25 µs of it.
        """
        add_slot, add_meta = self.slots.append, self.metas.append

        def pack(tensor: Tensor) -> Slot:
            slot = Slot()
            slot.frame = self
            slot.value = slot.kept = None
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
            pass_id, group = current_pass(), current_sharing()
            key = pass_id if group is None else group
            if self.inputs is None:
                return self._left_over(slot)
            if pass_id == -1:  # read from outside backward
                return self._recompute_one(slot)
            if self.filled_by != key:
                self._recompute_all(key, group)
            if slot.value is not None:
                return self._checked(slot, slot.value)
            return self._fetch_kept(slot, pass_id, group)

    def _fetch_kept(self, slot: Slot, pass_id: int, group: Sharing | None) -> Tensor:
        """Give the value of a slot where the graph is kept; it goes, unless a call of the group will need it again."""
        kept = slot.kept
        if isinstance(kept, Handed):
            again = kept.again() if kept.pass_id == pass_id else None
            if again is not None:
                return again
            if group is None or kept.pass_id == pass_id:
                return self._recompute_one(slot)
            if group.refuses_overlap:
                self._refuse_overlap()
            self._recompute_all(group, group)
            kept = slot.kept
            assert not isinstance(kept, Handed)
        if kept is None:
            return self._recompute_one(slot)
        value = self._checked(slot, kept)
        if group is None or not node_runs_in_part():
            slot.kept = Handed(value, pass_id)
        return value

    def _left_over(self, slot: Slot) -> Tensor:
        """The value of a slot whose region was let go, because all of its outputs were done.

        Raises:
            CheckpointError: it was used already.
        """
        if slot.value is None:
            message = (
                f"region '{self.name}': a tensor that left the region otherwise than by its result (through a list, an "
                "attribute) is run backward again after the region's own backward has freed what it needs.\n"
                "Return that tensor from the function, or pass retain_graph=True to the region's backward."
            )
            raise CheckpointError(message)
        return self._checked(slot, slot.value)

    def _refuse_overlap(self) -> None:
        message = (
            f"region '{self.name}': two backward calls of one GraphExecGroup need the same saved tensor.\n"
            "Backward calls in a group share one recomputation, so they must not overlap. Run the second one in a "
            "group of its own."
        )
        raise CheckpointError(message)

    def _checked(self, slot: Slot, value: Tensor | None) -> Tensor:
        """A recomputed value, if it is still what was saved."""
        assert value is not None
        if value._version != slot.version:  # noqa: SLF001
            message = (
                f"region '{self.name}': a saved tensor ({describe_tensor(value)}) was changed in place after it had "
                "been saved for backward, by the function itself.\n"
                "Without the region autograd would refuse this too. Use the out-of-place form of that operation."
            )
            raise ChangedInputError(message)
        return value

    def _recompute_one(self, slot: Slot) -> Tensor:
        """Recompute for one slot alone and keep nothing: a read outside backward, or of a value already used."""
        index = next(i for i, weak in enumerate(self.slots) if weak() is slot)
        filled = [(live, live.value) for weak in self.slots if (live := weak()) is not None]
        try:
            self._run(last=index, stops_early=True)
            value = self._checked(slot, slot.value)
        finally:
            for other, before in filled:
                other.value = before
        return value

    def _recompute_all(self, key: Any, group: Sharing | None) -> None:
        slots = self.slots
        last = len(slots) - 1
        while slots[last]() is None:
            last -= 1
        if self.was_filled:
            self._empty()
        self.was_filled = True
        self.filled_by = None
        self.is_home = get_ident() == self.thread
        self.keeps_graph = group is not None or pass_keeps_graph()
        self.is_differentiated = self.is_differentiated or torch.is_grad_enabled()
        try:
            self._run(last=last, stops_early=self.stops_early or self.is_open, is_last=self._is_last())
        except BaseException:
            self._empty()  # else the next pass would take what a failed recomputation made
            raise
        self.filled_by = key
        if self.keeps_graph:
            self._keep()
        else:
            self._release_if_last()
        if group is not None:
            group.filled(self)
        elif self.inputs is not None:
            when_pass_ends(Expiry(self, key))

    def _keep(self) -> None:
        """Where the graph is kept, slots outlive their nodes: each value must be handed over, see `fetch`."""
        for weak in self.slots:
            slot = weak()
            if slot is not None:
                slot.kept, slot.value = slot.value, None

    def _empty(self) -> None:
        for weak in self.slots:
            slot = weak()
            if slot is not None:
                slot.value = slot.kept = None

    def output_runs(self, _gradients: Any) -> None:
        """Called by each of several outputs when a pass reaches it."""
        pass_id = current_pass()
        seen_in, count = self.outputs_seen
        self.outputs_seen = (pass_id, count + 1 if seen_in == pass_id else 1)
        self._release_if_last()

    def _is_last(self) -> bool:
        """Whether the running pass frees the graph and reaches every output: no recomputation follows its own."""
        if self.keeps_graph or self.is_differentiated or pass_is_partial():
            return False
        seen_in, count = self.outputs_seen
        return self.outputs == 1 or (count == self.outputs and seen_in == current_pass())

    def _release_if_last(self) -> None:
        """Let the inputs go if this pass has recomputed and no other will."""
        if self.filled_by is not None and self._is_last():
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

    def _run(self, *, last: int, stops_early: bool, is_last: bool = False) -> None:
        """Run the function again up to saved tensor `last` and fill the live slots."""
        assert self.inputs is not None, "inputs go only when every live slot has its value"
        leaves = self.inputs.materialise(self.name)
        recorder = self.options.matcher.recorder(self, last=last, stops_early=stops_early, leaves=leaves)
        self.around.rerun(self._call, leaves, recorder.pack(), recorder.log, is_last)
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

    def _call(
        self,
        leaves: list[Any],
        pack: Callable[[Tensor], Any],
        log: OpLog | None,
        is_last: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Call the function under these hooks; it may be stopped."""
        assert self.inputs is not None
        assert self.fn is not None
        hook = quietly(pack) if function_mode_depth() else pack
        claim(hook, self)
        push_hooks(hook, same)
        try:
            context = self.recompute_context
            if context is None and log is None:
                self.inputs.call(self.fn, leaves)
            else:
                if is_last:
                    mark_last()
                if log is not None:
                    context = log if context is None else _both(context, log)
                assert context is not None
                with context:
                    self.inputs.call(self.fn, leaves)
        except StopRecomputation:
            pass
        finally:
            pop_hooks()

    def held_tensors(self) -> list[tuple[str, Any]]:
        """What the frame itself holds: what each is, and the tensor or what enclosing hooks gave for it."""
        return [] if self.inputs is None else self.inputs.held_tensors()


class Expiry:
    """Callback at the end of a pass; holds the frame weakly, so that it can die before."""

    __slots__ = ("_frame", "_key")

    def __init__(self, frame: Frame, key: Any) -> None:
        self._frame, self._key = ref(frame), key

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None and frame.filled_by == self._key:
            frame.expire()


@untraced
def unpack(slot: Slot) -> Tensor:
    """Saved-tensor hook of backward: give the slot's tensor, recomputing its region if need be."""
    value = slot.value
    if value is None or value._version != slot.version:  # noqa: SLF001
        value = slot.frame.fetch(slot)
    # Who asks? A C++ node has no Python caller but the engine's, or none on the engine's own threads. Asked of the
    # thread that ran forward, which is Python's, a depth of one is there: 0.2 µs less than `f_back`, measured.
    if slot.frame.is_home:
        try:
            code = _getframe(1).f_code
        except ValueError:  # filled there, read by a device's thread
            code = ENGINE_CODE
    else:
        caller = _getframe().f_back
        code = ENGINE_CODE if caller is None else caller.f_code
    if code is ENGINE_CODE:
        slot.value = None
    return value


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def same(tensor: Tensor) -> Tensor:
    """Unpack hook during recomputation: a backward inside the function reads the recomputed tensors as they are."""
    return tensor


def _checked_contexts(region: str, contexts: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    match contexts:
        case (forward, again) if hasattr(forward, "__enter__") and hasattr(again, "__enter__"):
            return forward, again
    message = f"region '{region}': context_fn must give two context managers, not {contexts!r}"
    raise TypeError(message)
