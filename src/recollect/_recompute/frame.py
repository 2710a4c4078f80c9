"""One execution of a region: its forward, the handles that stand for its saved tensors, and all that they hold.

Who keeps whom alive (no cycle, so reference counting frees everything)::

    autograd node -> handle (a number), hooks -> Frame -> inputs, function, state around the region
                                                 Frame -> handles

A frame dies when autograd has released the last of its saved tensors, the inputs with the frame. How a frame gets its
values back is its *way* (`Way`): by default the function runs again (`rerun.py`), once per backward pass. Which values
belong to which pass is in `refilled.py`. See docs/design/engine.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from torch import Tensor

from recollect._core.authors import Role
from recollect._core.pytree import Arguments
from recollect._core.scope import current_settings
from recollect._core.torch_private.ambient import function_mode_depth, quietly, without_function_modes
from recollect._core.torch_private.engine import pop_hooks, push_hooks, top_hooks
from recollect._recompute.contexts import Contexts
from recollect._recompute.handles import FIRST
from recollect._recompute.hooks import Meta, observe, quick_meta, read_meta
from recollect._recompute.inputs import Inputs
from recollect._recompute.joins import Joining
from recollect._recompute.memory import Memory
from recollect._recompute.oplog import OpLog
from recollect._recompute.outputs import Outputs, find_nodes
from recollect._recompute.refilled import Refilled
from recollect._recompute.surroundings import Surroundings
from recollect._recompute.values import Evidence
from recollect._recompute.way import Options, Pack, Sides, Way

__recollect_role__ = Role.REGION


class Frame(Refilled):
    """One execution of a region, from `enter` to its last saved tensor; after `leave` only the graph holds it.

    Attributes:
        metas: what the check compares, of each saved tensor; None: not noted.
        encloses: whether regions were entered inside.
        nested: notes of the regions inside; not set if there are none.
    """

    __slots__ = (
        *(
            "around",
            "contexts",
            "encloses",
            "entered",
            "evidence",
            "fn",
            "is_open",
            "joining",
            "log",
            "memory",
            "metas",
            "nested",
        ),
        *("options", "recompute_context", "stops_early", "way"),
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
        super().__init__(name)
        self.options, self.way, self.memory, self.joining = options, way, memory, joining
        self.fn: Callable[..., Any] | None = fn
        self.metas: list[Meta | None] = []
        self.is_open, self.encloses = True, False
        self.evidence: Evidence | None = None
        self.log: OpLog | None = None
        self.contexts: list[AbstractContextManager[Any]] | None = None
        self.entered: Contexts | None = None
        self.recompute_context: AbstractContextManager[Any] | None = None
        self.nested: Any

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
            self.name,
            self.fn,
            arguments,
            options.preserve,
            exact=check is not None,
            memory=self.memory,
            watches=True,
            restores=not options.counts_runs,
        )
        try:
            sides, pack = self.way.begin(self, arguments)
        except BaseException:
            around.abandon()
            raise
        explains = options.explain if settings.explain is None else settings.explain
        watch = around.watch
        if sides is not None or explains or around.is_captured or watch is not None:
            self._set_contexts(sides, watch, explains=explains)
        arguments.leaves = []
        return pack if check is None and self.log is None else self._observing(pack)

    def _set_contexts(self, sides: Sides | None, watch: AbstractContextManager[Any] | None, *, explains: bool) -> None:
        """What forward runs under."""
        contexts = [] if watch is None else [watch]
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
            self.outputs = Outputs(nodes, self.release_if_last)

    # What backward asks for: through the frame's way.
    def refill(self, *, is_last: bool) -> None:
        """A pass asks for the first time."""
        self.way.refill(self, is_last=is_last)

    def read(self, index: int) -> Tensor:
        """Make one saved tensor alone and keep nothing."""
        return self.way.read(self, index)

    def drop_inputs(self) -> None:
        """Let go of what only a recomputation needs."""
        if self.inputs is not None and self.inputs.are_led_to:
            self.inputs.empty()
        self.inputs = self.fn = self.recompute_context = None

    def held_tensors(self) -> list[tuple[str, Any]]:
        """What the frame itself holds: what each is, and the tensor or what enclosing hooks gave for it."""
        found = [] if self.inputs is None else self.inputs.held_tensors()
        return found + self.way.held(self)
