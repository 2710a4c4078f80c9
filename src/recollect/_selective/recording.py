"""Learns a program: records every call of torch that one forward makes, and what it saves, then keeps what is needed.

The recorder is a torch-function mode, which sees each call of torch once, with its arguments (3 µs; a dispatch mode
sees every operator beneath, at four times the cost). It holds all tensors until the forward is over, so it runs at the
first call of its kind only; `following.py` follows the program afterwards.

What a recording cannot vouch for breaks it, and the region is then recomputed by running its function again: writes in
place, attributes set, tensors that are no plain ones, memory left unfilled for others to write, arguments that may
change, generators of the user's own, running statistics, autocast switched, collectives, a backward inside, calls of
which only a part is kept. What is left is replayed once and compared, to the bit, before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.operators import UNFILLED, tensors_in
from recollect._core.pytree import Arguments
from recollect._core.scope import current_run
from recollect._core.torch_private.ambient import FunctionMode, any_autocast_enabled
from recollect._core.torch_private.dispatch import fake_class
from recollect._recompute.hooks import read_meta
from recollect._selective.kept_call import States, read_states, sources_of
from recollect._selective.program import (
    HELD,
    NOWHERE,
    Bound,
    Call,
    Inner,
    Link,
    Listed,
    Program,
    Source,
    Unfixed,
    View,
    template_of,
)

BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_UNFILLED = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in UNFILLED if hasattr(owner, name))
_GRAD = getattr(Tensor.grad, "__get__")  # noqa: B009 (a descriptor, whatever its annotation says)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClasses:
    """What plain tensors are where a region runs.

    Attributes:
        result: the class of what operators give.
        plain: all classes that can be vouched for.
        start: where a tensor starts in memory; of fake ones, where it would.
        can_compare: whether they have values.
    """

    result: type[Tensor]
    plain: frozenset[type[Tensor]]
    start: Callable[[Tensor], int]
    can_compare: bool


_REAL = TensorClasses(result=Tensor, plain=frozenset({Tensor, nn.Parameter}), start=Tensor.data_ptr, can_compare=True)


def tensor_classes(*, may_be_fake: bool) -> TensorClasses:
    """Those of this place."""
    fake = fake_class() if may_be_fake else None
    if fake is None:
        return _REAL
    return TensorClasses(result=fake, plain=_REAL.plain | {fake}, start=_start_of_fake, can_compare=False)


def _start_of_fake(tensor: Tensor) -> int:
    return (id(tensor.untyped_storage()) << 64) + int(tensor.storage_offset()) * tensor.element_size()


def name_of_call(func: Any) -> str:
    """A function of torch in words; an attribute by its name."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))


class RecordedCall:
    """One call of torch."""

    __slots__ = ("args", "func", "is_single", "kwargs", "links", "outs", "place", "saved", "states")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.links: list[int] = []
        self.outs: list[int] = []
        self.is_single = True
        self.place = ""
        self.saved = 0
        self.states: States = []


class Recording(FunctionMode):
    """Records one forward.

    Attributes:
        entries: its calls that gave tensors.
        tensors: all tensors it met, by number.
        saved: each saved tensor, the call that saved it (None: none did) and which of its saved tensors it is.
        why_broken: why it cannot be believed; None if it can.
    """

    def __init__(self, classes: TensorClasses) -> None:
        super().__init__()
        self.classes = classes
        self.entries: list[RecordedCall] = []
        self.tensors: list[Tensor] = []
        self.saved: list[tuple[Tensor, RecordedCall | None, int]] = []
        self.why_broken: str | None = None
        self.is_paused = False
        self.current: RecordedCall | None = None
        self._versions: list[int] = []
        self._makers: list[int] = []
        self._inputs: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._autocast = any_autocast_enabled()
        self._run = current_run()  # a backward inside the function may recompute: that is another run

    def begin(self, arguments: Arguments) -> None:
        """Number the region's arguments."""
        for index in arguments.tensors:
            tensor = arguments.leaves[index]
            if id(tensor) not in self._numbers:
                self._inputs[self._new(tensor, NOWHERE)] = index

    def broken(self, why: str) -> None:
        """The recording cannot vouch for what happens."""
        if self.why_broken is None:
            self.why_broken = why

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call and record it."""
        kwargs = kwargs or {}
        if self.is_paused or self.why_broken is not None or current_run() is not self._run:
            return func(*args, **kwargs)
        if func in BACKWARD:
            self.broken(f"{name_of_call(func)} runs inside it")
            return func(*args, **kwargs)
        values = (*args, *kwargs.values())
        if any(isinstance(value, torch.Generator) for value in values):
            self.broken("it draws from its own generator")
        entry = RecordedCall(func)
        states = read_states(sources_of(tensors_in(*values), values))
        if states is None:
            self.broken("a CUDA graph is being captured")
        entry.states = states or []
        outer, self.current = self.current, entry
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = outer
        self._record(entry, args, kwargs, result)
        return result

    def _record(self, entry: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        func = entry.func
        if getattr(func, "__name__", "") == "__set__":
            self.broken(f"it sets the attribute {name_of_call(func)} of a tensor")
        results = results_of(result)
        if results is None:
            if entry.saved:
                self.broken(f"{name_of_call(func)} returns no tensor that can be recomputed")
            return
        if func in _UNFILLED or func == _GRAD:
            self.broken(f"{name_of_call(func)} cannot be recomputed")
        if any_autocast_enabled() is not self._autocast:
            self.broken("it switches autocast on or off")
        entry.is_single = type(result) is self.classes.result
        entry.args = [self._template(value, entry.links) for value in args]
        entry.kwargs = {name: self._template(value, entry.links) for name, value in kwargs.items()}
        entry.outs = [self._number(tensor, len(self.entries)) for tensor in results]
        self.entries.append(entry)

    def _template(self, value: Any, links: list[int]) -> Any:
        def name(tensor: Tensor) -> int:
            links.append(self._number(tensor, NOWHERE))
            return links[-1]

        try:
            return template_of(value, name)
        except Unfixed:
            self.broken(f"a call of torch takes a {type(value).__name__}, which may change afterwards")
            return None

    def _new(self, tensor: Tensor, maker: int) -> int:
        number = self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self._makers.append(maker)
        is_plain = type(tensor) in self.classes.plain and tensor.layout is torch.strided and not tensor.is_inference()
        if not is_plain or tensor.is_complex():  # a view of complex numbers may be a conjugate one
            self.broken(f"it works on an unusual tensor ({type(tensor).__name__}, {tensor.layout})")
            self._versions.append(0)
        else:
            self._versions.append(tensor._version)  # noqa: SLF001
        return number

    def _number(self, tensor: Tensor, maker: int) -> int:
        number = self._numbers.get(id(tensor))
        return self._new(tensor, maker) if number is None else number

    def note_saved(self, tensor: Tensor) -> None:
        """A tensor is saved."""
        entry = self.current
        self.saved.append((tensor, entry, entry.saved if entry is not None else 0))
        if entry is not None:
            entry.saved += 1

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is not None:
            self.forget()

    def forget(self) -> None:
        """Let every tensor go."""
        self.tensors, self.saved, self.entries, self._numbers = [], [], [], {}

    # After forward.
    def check_versions(self) -> None:
        """Break if anything was written into in place."""
        if self.why_broken is None and any(
            tensor._version != version  # noqa: SLF001
            for tensor, version in zip(self.tensors, self._versions, strict=True)
        ):
            self.broken("it writes into tensors in place")

    def results(self, entry: RecordedCall) -> list[Tensor]:
        """What a call gave."""
        return [self.tensors[number] for number in entry.outs]

    def saved_inside(self, entry: RecordedCall) -> list[Tensor]:
        """What a call saved of its own."""
        return [t for t, owner, _ in self.saved if owner is entry and self._trace(t, entry) is None]

    def _trace(self, tensor: Tensor, entry: RecordedCall | None) -> Source | None:
        """The number of a saved tensor, or of what it is a view of; None if it was made inside its call."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        if entry is not None:
            for number in (*entry.outs, *entry.links):
                if _is_view(tensor, self.tensors[number]):
                    return _view(tensor, self.tensors[number], number)
        return None

    def _views(self, viewing: set[int]) -> list[View | None]:
        """For each number, what it is a view of, seen through views of views, if the calls that made them only view."""
        views: list[View | None] = [None] * len(self.tensors)
        for index in sorted(viewing):
            entry = self.entries[index]
            for number in entry.outs:
                tensor = self.tensors[number]
                for link in entry.links:
                    base = views[link]
                    root = link if base is None else base.number
                    other = self.tensors[root]
                    if root != number and self._makers[number] == index and _is_view(tensor, other):
                        views[number] = _view(tensor, other, root)
                        break
        return views

    def program(self, kept: set[int], drawing: set[int], viewing: set[int]) -> tuple[Program, Bound]:
        """What replay needs so that results of these calls, by index, are kept, and what this execution has of it.

        Args:
            kept: the calls whose results are kept.
            drawing: the calls that draw random numbers.
            viewing: the calls that only view.
        """
        outside = {n for n, maker in enumerate(self._makers) if maker == NOWHERE and n not in self._inputs}
        raw = Program()
        raw.makers = list(self._makers)
        raw.views = self._views(viewing - kept)
        index_of = {id(entry): index for index, entry in enumerate(self.entries)}
        for entry in self.entries:
            call = Call(entry.func, None, is_single=entry.is_single, draws=False)
            call.links = tuple(entry.links)
            raw.calls.append(call)
        held: list[Any] = [None] * len(self.tensors)
        for number in outside.union(*(self.entries[index].outs for index in kept)):
            held[number] = self.tensors[number]
        for tensor, owner, place in self.saved:
            source = self._trace(tensor, owner)
            base = source.number if isinstance(source, View) else source
            beneath = raw.views[base] if isinstance(base, int) else None
            if beneath is not None:
                base = beneath.number
                source = _view(tensor, self.tensors[base], base)
            if base is None:
                index = NOWHERE if owner is None else index_of.get(id(owner), NOWHERE)
                source = HELD if index == NOWHERE or index in kept else Inner(index, place)
            elif isinstance(base, int) and held[base] is not None:
                source = HELD  # its memory is held anyway, so that the slot may hold it as well
            assert source is not None
            raw.sources.append(source)
            raw.metas.append(read_meta(tensor))
        uses = raw.count_uses(list(range(len(raw.sources))), held)
        return _Renumbering(self, raw, held, uses).finish(drawing)


class _Renumbering:
    """Turns what the recording saw into a program of what is needed."""

    def __init__(self, recording: Recording, raw: Program, held: list[Any], uses: list[int]) -> None:
        self._recording, self._raw, self._held, self._uses = recording, raw, held, uses
        needed = {n for n, count in enumerate(uses) if count}
        # Views have numbers too: not to be made, but to be known again where a call takes them.
        needed |= {n for n, view in enumerate(raw.views) if view is not None and view.number in needed}
        self._new = {number: new for new, number in enumerate(sorted(needed))}

    def finish(self, drawing: set[int]) -> tuple[Program, Bound]:  # noqa: C901 (one pass over each list)
        recording, raw, held, uses, new = self._recording, self._raw, self._held, self._uses, self._new
        program = Program()
        program.makers = [raw.makers[number] for number in new]
        program.uses = [uses[number] for number in new]
        program.metas = raw.metas
        program.views = [self._view(raw.views[number]) for number in new]
        program.inputs = {new[number]: leaf for number, leaf in recording._inputs.items() if number in new}  # noqa: SLF001
        bound = Bound(len(new), len(recording.entries))
        for number, place in new.items():
            bound.versions[place] = recording._versions[number]  # noqa: SLF001
            if held[number] is not None and raw.views[number] is None:
                bound.held[place] = hold(held[number])
        inner_calls = {source.call for source in raw.sources if isinstance(source, Inner)}
        made_again = inner_calls | {
            raw.makers[n] for n in new if raw.makers[n] != NOWHERE and held[n] is None and raw.views[n] is None
        }
        for index, entry in enumerate(recording.entries):
            call = self._call(entry, draws=index in drawing, is_recorded=index in made_again)
            call.is_identity = any(raw.makers[number] != index for number in entry.outs)
            if index in made_again:
                bound.arguments[index] = self._arguments(call, entry)
                if call.draws:
                    bound.states[index] = entry.states
            if index in inner_calls:
                call.needs_grad = tuple(recording.tensors[number].requires_grad for number in entry.links)
            call.settle()
            program.calls.append(call)
        bases = {view.number for view in program.views if view is not None}
        for place, source in enumerate(raw.sources):
            renumbered: Source = new[source] if isinstance(source, int) else self._view(source) or source
            if isinstance(source, Inner):
                program.inner.setdefault(source.call, []).append(place)
            program.sources.append(renumbered)
            if isinstance(renumbered, View):
                bases.add(renumbered.number)
        program.bases, program.draws = frozenset(bases), bool(drawing)
        for call in program.calls:
            call.is_base = call.number in bases
        return program, bound

    def _view(self, source: Any) -> View | None:
        if not isinstance(source, View):
            return None
        return View(self._new[source.number], source.shape, source.stride, source.steps, source.delta)

    def _call(self, entry: RecordedCall, *, draws: bool, is_recorded: bool) -> Call:
        recording, new = self._recording, self._new
        results = recording.results(entry)
        shapes = results[0].shape if entry.is_single else [(tensor.shape, tensor.dtype) for tensor in results]
        call = Call(entry.func, shapes, is_single=entry.is_single, draws=draws)
        call.dtype, call.place = results[0].dtype, entry.place
        call.outs = [new.get(number, NOWHERE) for number in entry.outs]
        views = {place: self._view(self._raw.views[number]) for place, number in enumerate(entry.outs) if number in new}
        call.views = {place: view for place, view in views.items() if view is not None} or None
        call.kept = frozenset(
            place for place in views if views[place] is None and self._held[entry.outs[place]] is not None
        )
        call.is_recorded = is_recorded
        call.is_checked = is_recorded or (call.views is not None and all(number in new for number in entry.links))
        if call.is_checked:
            call.links = tuple(new[number] for number in entry.links)
            call.size = len(entry.args)
            call.is_general = any(isinstance(value, (Link, Listed)) for value in entry.kwargs.values()) or any(
                isinstance(value, Listed) for value in entry.args
            )
            if not call.is_general:
                places = enumerate(entry.args)
                call.tensors = tuple((place, new[value]) for place, value in places if isinstance(value, Link))
                call.others = tuple(p for p, value in enumerate(entry.args) if not isinstance(value, Link))
        return call

    def _arguments(self, call: Call, entry: RecordedCall) -> Any:
        if call.is_general:
            args = [self._renumber(value) for value in entry.args]
            return args, {name: self._renumber(value) for name, value in entry.kwargs.items()}
        return ([entry.args[place] for place in call.others], entry.kwargs) if call.others or entry.kwargs else None

    def _renumber(self, value: Any) -> Any:
        if isinstance(value, Link):
            return Link(self._new[value])
        if isinstance(value, Listed):
            return Listed(value.kind, [self._renumber(item) for item in value.items])
        return value


def _is_view(tensor: Tensor, other: Tensor) -> bool:
    return other.untyped_storage() is tensor.untyped_storage() and other.dtype == tensor.dtype


def _view(tensor: Tensor, other: Tensor, number: int) -> View:
    steps = int(tensor.storage_offset() - other.storage_offset())
    return View(number, tensor.shape, tensor.stride(), steps, steps * tensor.element_size())


def hold(tensor: Tensor) -> Tensor:
    """What to hold of a tensor: a leaf itself, of others an alias cut off from the graph; both see writes."""
    return tensor if tensor.is_leaf else tensor.detach()


def results_of(result: Any) -> list[Tensor] | None:
    """The tensors that a call gave; None if it gave none, or something that cannot be made again in parts."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)) and type(result) is not torch.Size:
        found = [part for part in result if isinstance(part, Tensor)]
        return found or None
    return None
