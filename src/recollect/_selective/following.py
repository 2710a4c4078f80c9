"""Follows a program through one forward: checks that the region makes the same calls, and holds what replay needs.

Arguments that are not tensors, such as Python numbers, are taken from this very call, so that replay does what this
forward did and not what an earlier one did. Where the calls, their shapes or where tensors go differ from the program,
it is broken: the region is recomputed by running its function again, and its next call learns a new program.
"""

from __future__ import annotations

from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Size, Tensor

from recollect._core.operators import ROUTING, tensors_in
from recollect._core.scope import current_run
from recollect._core.torch_private.ambient import FunctionMode, any_autocast_enabled, quietly
from recollect._core.torch_private.composites import ATTENTION
from recollect._recompute.handles import FIRST
from recollect._recompute.hooks import read_meta
from recollect._selective.binding import OTHER_CALLS, OTHER_WAYS, Binding
from recollect._selective.draws import Draws
from recollect._selective.kept_call import States
from recollect._selective.program import HELD, Bound, Call, Cast, HeldCast, Inner, Program, View
from recollect._selective.recording import CALLS_COMPILED, results_of
from recollect._selective.tensor_classes import TensorClasses

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame
    from recollect._recompute.way import Pack

_OTHER_DRAWS = "a call draws random numbers, but drew none before"

CHOOSING = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in ROUTING if hasattr(owner, name))
_HARMLESS = frozenset({"retain_grad", "_assert_async"})
_VALUES = frozenset({Size, bool, int, float, torch.dtype, torch.device, torch.layout})
_END = Call(None, None, is_single=True, draws=False)


class Following(Binding, FunctionMode):
    """One forward under a program."""

    def __init__(self, program: Program, classes: TensorClasses, *, notes_choices: bool) -> None:
        super().__init__(program, classes)
        self._result, self._notes_choices = classes.result, notes_choices
        self.choices: list[list[Tensor]] = []
        self.is_paused = self._is_calling = False
        self._calls = program.calls
        self._next = 0
        self._pending: list[tuple[Tensor, View | int]] = []
        self._casts: list[tuple[HeldCast, Tensor, int]] = []  # what is held of some numbers, and its version
        self._draws = Draws()
        self._autocast = any_autocast_enabled()
        self._run = current_run()

    def _note_choice(self, result: Any) -> None:
        """Remember routing results, which must not come out otherwise if the program breaks."""
        self.choices.append([tensor.detach() for tensor in tensors_in(result)])

    def meet_compiled(self) -> None:
        """Compiled code is called, where none was when the program was learned."""
        if self.why_broken is None and not self.is_paused and current_run() is self._run:
            self.why_broken = CALLS_COMPILED

    def __torch_function__(  # noqa: C901, PLR0911, PLR0912, PLR0915 (written out: it runs per call of torch)
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call and follow the program."""
        if self.why_broken is not None or self.is_paused or current_run() is not self._run:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if self._notes_choices and func in CHOOSING and current_run() is self._run and not self.is_paused:
                self._note_choice(result)
            return result
        if func is ATTENTION:
            return self.look_inside(args, kwargs or {})
        index = self._next
        try:
            call = self._calls[index]
        except IndexError:
            call = _END
        if call.draws and call.func == func:
            self._note_draw(index, call)
        self._is_calling = True
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._is_calling = False
        if type(result) in _VALUES:
            return result  # it asked for a shape, a dtype or the like
        if self._notes_choices and func in CHOOSING:
            self._note_choice(result)
        is_alike = type(result) is self._result and call.shapes == result.shape and call.dtype is result.dtype
        if is_alike and call.is_usual and call.func is func:
            self._next = index + 1
            refs, versions = self._refs, self.bound.versions
            if len(args) != call.size:
                self.why_broken = OTHER_WAYS
                return result
            for place, number in call.tensors:
                value, known = args[place], refs[number]
                if known is None:
                    self._bind_outside(number, value)
                elif known() is not value or value._version != versions[number]:  # noqa: SLF001
                    self.why_broken = OTHER_WAYS
            number, view = call.number, call.view
            refs[number] = ref(result)
            versions[number] = result._version  # noqa: SLF001
            if view is not None:
                if not self._is_view(result, view):
                    self.why_broken = OTHER_WAYS
            elif call.others or kwargs:
                self.bound.arguments[index] = self._rest(call, args, kwargs)
            if call.is_base:
                self._starts[number] = self._start(result)
            if self._pending:
                self._check_pending()
            return result
        if type(result) is self._result:
            if not is_alike or (call.func is not func and call.func != func):
                self.why_broken = OTHER_CALLS
                return result
        elif not self._is_as_planned(call, func, result):
            if result is None and getattr(func, "__name__", "") not in _HARMLESS and tensors_in(args, kwargs):
                self.why_broken = OTHER_CALLS  # it may have written into a tensor
            return result
        self._next = index + 1
        refs, bound = self._refs, self.bound
        if call.is_checked:
            if call.is_general or len(args) != call.size:
                self._bind_general(index, call, args, kwargs)
            else:
                given = call.line_up(args, kwargs)
                for place, number in call.tensors:
                    value = given[place]
                    known = refs[number]
                    if known is None:
                        self._bind_outside(number, value)
                    elif known() is not value or value._version != bound.versions[number] + (  # noqa: SLF001
                        call.bump if number == call.written else 0
                    ):
                        self.why_broken = OTHER_WAYS
                if call.is_recorded and (call.others or kwargs):
                    bound.arguments[index] = self._rest(call, args, kwargs)
                if call.needs_grad is not None and self.why_broken is None:
                    self._check_grad(call, [given[place] for place, _ in call.tensors])
        if call.scratch or call.is_overwritten:
            self._check_memory(call, args, kwargs, result)
        if call.is_identity:
            self._check_identity(index, call, result)
        if call.views is not None:
            self._bind_views(call, result)
        elif call.is_single:
            number = call.outs[0]
            if number >= 0:
                refs[number] = ref(result)
                bound.versions[number] = result._version  # noqa: SLF001
                if call.kept:
                    bound.held[number] = result.detach()
                if call.is_base:
                    self._starts[number] = self._start(result)
        else:
            self._bind_results(call, result)
        if self._pending:
            self._check_pending()
        if call.draws:
            self._draws.end(call.sources)
        return result

    def _is_as_planned(self, call: Call, func: Any, result: Any) -> bool:
        """Whether a call that did not give one tensor follows the program; those that give none are in no program."""
        results = results_of(result)
        if results is None:
            return False
        if (
            call.is_single
            or (call.func is not func and call.func != func)
            or call.shapes != [(tensor.shape, tensor.dtype) for tensor in results]
        ):
            self.why_broken = OTHER_CALLS
            return False
        return True

    def packer(self, frame: Frame) -> Pack:  # noqa: C901 (one branch for each source)
        """The saved-tensor hook of forward: gives a handle, and checks that the tensor is what the program says.

        A closure, written out: it runs per saved tensor.
        """
        add_handle, refs, pending, versions = frame.handles.append, self._refs, self._pending, self.bound.versions
        sources, size, number = self.program.sources, len(self.program.sources), count(FIRST).__next__
        casts, add_cast = self.program.held_casts, self._casts.append
        held = frame.held = {}

        def pack(tensor: Tensor) -> int:  # noqa: C901
            handle = number()
            index = handle - FIRST
            add_handle(handle)
            if self.why_broken is not None or index >= size:
                self._pack_unplanned(frame, tensor, index)
                return handle
            source = sources[index]
            if source is HELD:
                value = tensor.detach() if self._is_calling else quietly(Tensor.detach)(tensor)
                held[index] = (value, value._version)  # noqa: SLF001
                if index in casts:
                    add_cast((casts[index], *held[index]))
            elif type(source) is int:
                known = refs[source]
                if known is None:
                    pending.append((tensor, source))
                elif known() is not tensor or tensor._version != versions[source]:  # noqa: SLF001
                    self.why_broken = OTHER_WAYS
            elif type(source) is View:
                pending.append((tensor, source))
                if refs[source.number] is not None and tensor._version != versions[source.number]:  # noqa: SLF001
                    self.why_broken = OTHER_WAYS
            elif (type(source) is Inner or type(source) is Cast) and source.call != self._next:
                self.why_broken = OTHER_CALLS
            elif type(source) is Cast and (tensor.dtype, tensor.shape, tensor.stride()) != source.kind:
                self.why_broken = OTHER_WAYS
            return handle

        return pack

    def _pack_unplanned(self, frame: Frame, tensor: Tensor, index: int) -> None:
        """The program is broken: the function will run again, and what it saves is compared as in any frame."""
        self.why_broken = self.why_broken or OTHER_CALLS
        frame.metas += [None] * (index - len(frame.metas))
        frame.metas.append(read_meta(tensor))

    def _check_pending(self) -> None:
        """Saved views: their base, which may be the result of the very call that saved them, must be where planned."""
        for tensor, source in self._pending:
            if isinstance(source, View):
                if not self._is_view(tensor, source):
                    self.why_broken = OTHER_WAYS
                continue
            known = self._refs[source]
            base = known() if known is not None else None
            if base is None or self._start(base) != self._start(tensor) or base.stride() != tensor.stride():
                self.why_broken = OTHER_WAYS
        self._pending.clear()

    def _bind_casts(self) -> None:
        """Hold casts in place of what they were made of: calls that are made again would cast it again."""
        for cast, tensor, version in self._casts:
            if (tensor.dtype, tensor.shape, tensor.stride()) != cast.kind:
                self.why_broken = self.why_broken or OTHER_WAYS
                continue
            self.bound.held[cast.number], self.bound.versions[cast.number] = cast.find_value(tensor), version
        self._casts.clear()

    def _note_draw(self, index: int, call: Call) -> None:
        now, is_known = self._draws.begin(call.sources)
        self.bound.states[index] = now
        if now is None:
            self.why_broken = "a CUDA graph is being captured"
        elif not is_known:
            self.why_broken = _OTHER_DRAWS

    def conclude(self, moved: States) -> None:
        """Forward is over: was all as planned, and did only those calls draw that were known to?

        Args:
            moved: the generators that moved, and where they stood at entry.
        """
        program = self.program
        if self.why_broken is None and (
            self._next != len(program.calls) or any_autocast_enabled() is not self._autocast
        ):
            self.why_broken = OTHER_CALLS
        if self.why_broken is None and self._pending:
            self._check_pending()
        self._bind_casts()
        if not self._draws.are_all(moved):
            self.why_broken = self.why_broken or _OTHER_DRAWS
        self._pending.clear()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is not None:
            self.part()

    def part(self) -> Bound:
        """Give away what is bound, and hold nothing more: the graph keeps the hooks of forward, and they keep this."""
        bound, self.bound = self.bound, Bound(0, 0)
        self.choices = []
        self._refs.clear()
        self._starts.clear()
        return bound
