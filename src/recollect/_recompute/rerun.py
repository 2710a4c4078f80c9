"""The default way of getting values back: run the function again, once per backward pass, until the last is made.

The usual recomputation collects what the function saves and compares it with forward all at once (`Collector`). Where
that does not do, or something differs, a `Recorder` looks at each tensor as it is saved, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect._core.authors import Role
from recollect._core.pytree import Arguments
from recollect._core.scope import mark_last
from recollect._core.torch_private.ambient import function_mode_depth, quietly
from recollect._core.torch_private.dispatch import dispatch_mode_depth
from recollect._core.torch_private.engine import pop_hooks, push_hooks
from recollect._recompute.frame import Frame
from recollect._recompute.handles import find_live
from recollect._recompute.hooks import Meta, StopRecomputation, differs, find_again, may_stop, quick_meta, read_meta
from recollect._recompute.oplog import OpLog
from recollect._recompute.refusals import refuse_changed, refuse_spent
from recollect._recompute.way import Hooks, Pack, Sides

if TYPE_CHECKING:
    from recollect._recompute.match import Recorder


__recollect_role__ = Role.REGION


class Rerun:
    """Runs the function again. Has no state of its own: one serves all frames."""

    __slots__ = ()

    def begin(self, frame: Frame, arguments: Arguments) -> tuple[Sides | None, Pack]:
        """Nothing is around forward but what the region's options say; that may know a way of its own."""
        make = frame.options.contexts
        if make is None:
            return None, frame.pack()
        sides = _checked_contexts(frame.name, make())
        take_over = getattr(sides[1], "take_over", None)
        return sides, frame.pack() if take_over is None else take_over(frame)

    def settle(self, frame: Frame) -> None:
        """There is nothing to learn."""

    def hook(self, frame: Frame, recorder: Recorder | Collector) -> Pack:
        """The saved-tensor hook of a recomputation."""
        del frame
        return recorder.pack()

    def refill(self, frame: Frame, *, is_last: bool) -> None:
        """Run the function again and fill what is still asked for."""
        live = find_live(frame.handles)
        # Whether what the function saves may be compared all at once, as far as is known before it runs.
        may_collect = frame.stops_early and frame.evidence is None and frame.log is None and not frame.is_open
        if live is None and may_collect:
            assert frame.inputs is not None, "inputs go only when every value is there"
            leaves = frame.inputs.materialise(frame.name)
            collector = Collector(frame, leaves)
            hooks = self.hook(frame, collector), collector.find
            try:
                frame.around.rerun(_call, frame, leaves, hooks, None, is_last)
            except BaseException:
                collector.release()
                raise
            if collector.fill():
                return
        last = len(frame.handles) - 1
        while live is not None and not live[last]:
            last -= 1
        self._run(frame, frame.values, live, last=last, stops_early=frame.stops_early or frame.is_open, is_last=is_last)

    def read(self, frame: Frame, index: int) -> Tensor:
        """Run the function again as far as to one saved tensor."""
        found: dict[int, tuple[Tensor, int]] = {}
        live = [number == index for number in range(len(frame.handles))]
        self._run(frame, found, live, last=index, stops_early=True)
        value, version = found.pop(index)
        if value._version != version:  # noqa: SLF001
            refuse_changed(frame.name, value)
        return value

    def held(self, frame: Frame) -> list[tuple[str, Any]]:
        """Nothing."""
        del frame
        return []

    def _run(
        self,
        frame: Frame,
        values: dict[int, tuple[Tensor, int]],
        live: list[bool] | None,
        *,
        last: int,
        stops_early: bool,
        is_last: bool = False,
    ) -> None:
        """Run the function again up to saved tensor `last`.

        Args:
            frame: whose function.
            values: filled, by index, with what it saves.
            live: of which saved tensors; None for all.
            last: the last one that is needed.
            stops_early: whether to stop there.
            is_last: whether no recomputation of the frame will follow.
        """
        assert frame.inputs is not None, "inputs go only when every value is there"
        leaves = frame.inputs.materialise(frame.name)
        recorder = frame.options.matcher.recorder(
            frame, values, live, last=last, stops_early=stops_early, leaves=leaves
        )
        hooks = self.hook(frame, recorder), find_again
        frame.around.rerun(_call, frame, leaves, hooks, recorder.log, is_last)
        recorder.conclude()


RERUN = Rerun()


class Collector:
    """Collects what one recomputation saves, to be compared with forward when it has ended.

    The tensors stay in the graph of the recomputation where that holds nothing else: autograd cuts them off itself when
    backward unpacks them. That graph holds the hooks, and so nothing that these lead to may hold the tensors any longer
    when all is collected.

    Attributes:
        count_made: how many tensors it has saved.
    """

    __slots__ = ("_frame", "_leaves", "_made", "_metas", "count_made")

    def __init__(self, frame: Frame, leaves: list[Any]) -> None:
        self._frame, self._leaves = frame, leaves
        made: list[Tensor] = []
        self._made, self.count_made = made, made.__len__
        self._metas: list[Meta] = []

    def pack(self) -> Pack:
        """The saved-tensor hook of recomputation: collects, and stops after the last tensor that is needed.

        A closure, written out: it runs per saved tensor. The metadata take 0.25 µs of it.
        """
        made = self._made
        add, add_meta, enough, count = made.append, self._metas.append, len(self._frame.handles), 0

        def pack(tensor: Tensor) -> int:
            nonlocal count
            try:
                add_meta(quick_meta(tensor))
            except RuntimeError:  # a layout without a shape
                add_meta(read_meta(tensor))
            add(tensor)
            count += 1
            if count >= enough:
                before = made[-2] if count > 1 and not made[-2].requires_grad else None
                if count > enough or may_stop(self._frame, before, tensor, self._leaves):
                    raise StopRecomputation
            return count

        return pack

    def find(self, count: int) -> Tensor:
        """Unpack hook during recomputation: a backward inside the function reads the recomputed tensors as they are."""
        try:
            return self._made[count - 1]
        except IndexError:
            refuse_spent()

    def fill(self) -> bool:
        """Give what was collected to the frame; False, and nothing is given, if something differs from forward."""
        frame, made, metas = self._frame, self._made[:], self._metas
        self.release()
        enough = len(frame.handles)
        del made[enough:], metas[enough:]  # one more may have come before it stopped
        if len(made) < enough:
            return False
        if metas != frame.metas and frame.options.matcher.metadata:
            triples = zip(frame.metas, metas, made, strict=True)
            if any(noted != meta and differs(noted, meta, tensor, frame) for noted, meta, tensor in triples):
                return False
        inputs = frame.inputs
        if inputs is not None and inputs.aliases is not None and not frame.encloses and not dispatch_mode_depth():
            inputs.are_led_to = True
        else:
            made = [tensor if tensor.is_leaf else tensor.detach() for tensor in made]
        frame.values.update(enumerate(zip(made, map(_VERSION, metas), strict=True)))
        return True

    def release(self) -> None:
        """Hold nothing any longer: the graph of the recomputation, if it lives on, holds the hooks."""
        del self._made[:], self._frame
        self._leaves = []


_VERSION = itemgetter(3)  # of metadata


def log_again(frame: Frame, leaves: list[Any]) -> OpLog:
    """Run the function once more only to log its operators, to the end or to its first error."""
    log = OpLog(frame.name)

    def pack(tensor: Tensor) -> Tensor:
        log.note_saved(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    with suppress(Exception):
        frame.around.rerun(_call, frame, leaves, (pack, find_again), log, False)  # noqa: FBT003
    return log


def _call(frame: Frame, leaves: list[Any], hooks: Hooks, log: OpLog | None, is_last: bool) -> None:  # noqa: FBT001
    """Call the function under these hooks; it may be stopped."""
    inputs, fn, context = frame.inputs, frame.fn, frame.recompute_context
    assert inputs is not None
    assert fn is not None
    pack, unpack = hooks
    hook = quietly(pack) if function_mode_depth() else pack
    hook.frame = frame  # type: ignore[attr-defined]
    push_hooks(hook, unpack)
    try:
        if context is None and log is None:
            result = inputs.call(fn, leaves)
        else:
            if is_last:
                mark_last()
            if log is not None:
                context = log if context is None else _both(context, log)
            assert context is not None
            with context:
                result = inputs.call(fn, leaves)
                if frame.joining is not None:
                    frame.joining.give_again(result, hook)
            return
        if frame.joining is not None:
            frame.joining.give_again(result, hook)
    except StopRecomputation:
        pass
    finally:
        pop_hooks()
        hook.frame = None  # type: ignore[attr-defined]


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _checked_contexts(region: str, contexts: Any) -> Sides:
    match contexts:
        case (forward, again) if hasattr(forward, "__enter__") and hasattr(again, "__enter__"):
            return forward, again
    message = f"region '{region}': context_fn must return two context managers, not {contexts!r}"
    raise TypeError(message)
