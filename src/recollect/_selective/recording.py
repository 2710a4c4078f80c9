"""Learns a program: records every call of torch that one forward makes, and what it saves, then keeps what is needed.

The recorder is a torch-function mode, which sees each call of torch once, with its arguments (3 µs; a dispatch mode
sees every operator beneath, at four times the cost). It holds all tensors until the forward is over, so it runs at the
first call of its kind only; `following.py` follows the program afterwards.

What a recording cannot vouch for breaks it, and the region is then recomputed by running its function again: writes in
place where something else shares the memory, attributes set, tensors that are no plain ones, memory left unfilled for
others to write, arguments that may change, generators of the user's own, autocast switched, collectives, a backward
inside, calls of which only a part is kept. What is left is replayed once and compared, to the bit, before it is
believed.
"""

from __future__ import annotations

from collections import defaultdict
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.operators import UNFILLED, tensors_in
from recollect._core.pytree import Arguments
from recollect._core.scope import current_run
from recollect._core.torch_private.ambient import FunctionMode, any_autocast_enabled
from recollect._core.torch_private.composites import ATTENTION
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.functorch import is_tracked
from recollect._recompute.hooks import read_meta
from recollect._selective.casts import hold_casts, may_be_cast
from recollect._selective.kept_call import States, has_same_bits, read_states, sources_of, version_of
from recollect._selective.program import (
    HELD,
    NOWHERE,
    Bound,
    Call,
    Cast,
    Inner,
    Link,
    Listed,
    Program,
    Source,
    Unfixed,
    View,
    template_of,
)
from recollect._selective.renumbering import Renumbering
from recollect._selective.tensor_classes import TensorClasses

BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_UNFILLED = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in UNFILLED if hasattr(owner, name))
WRITES = "it writes into tensors in place"
"""Why a recording is broken where something else shares the memory, or needs what was overwritten."""
CALLS_COMPILED = "it calls compiled code, which runs again as a whole"
"""Why it is broken where torch.compile has made some of the calls one."""
_GRAD = getattr(Tensor.grad, "__get__")  # noqa: B009 (a descriptor, whatever its annotation says)


def name_of_call(func: Any) -> str:
    """A function of torch in words; an attribute by its name."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))


class RecordedCall:
    """One call of torch."""

    __slots__ = (
        *("args", "bump", "copies", "func", "is_single", "kwargs", "links"),
        *("outs", "place", "saved", "states", "statistics", "written"),
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.args: list[Any] = []
        self.copies: list[tuple[Tensor, ref[Any]]] = []  # what was cast or copied inside, and the memory of what came
        self.kwargs: dict[str, Any] = {}
        self.links: list[int] = []
        self.outs: list[int] = []
        self.is_single = True
        self.place = ""
        self.saved = 0
        self.states: States = []
        self.written, self.bump = NOWHERE, 0  # the number it overwrites, and how far that moves the version
        self.statistics: frozenset[int] = frozenset()  # numbers of what it updates unseen

    def is_plain(self) -> bool:
        """Whether its tensors stand on their own, and not in lists or keywords."""
        return not any(isinstance(value, Listed) for value in self.args) and not any(
            isinstance(value, (Link, Listed)) for value in self.kwargs.values()
        )


class Recording(FunctionMode):
    """Records one forward.

    Attributes:
        entries: its calls that gave tensors.
        tensors: all tensors it met, by number.
        saved: each saved tensor, the call that saved it (None: none did) and which of its saved tensors it is.
        versions: of the tensors when they were met.
        inputs: for numbers of the region's arguments, which leaf of them each is.
        kept_inside: ids of saved tensors that a policy keeps though calls made them inside.
        overwritten: numbers whose tensors have another value now, under another number.
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
        self.versions: list[int] = []
        self._makers: list[int] = []
        self.inputs: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._casts: dict[int, Cast | None] = {}
        self.overwritten: set[int] = set()
        self.kept_inside: set[int] = set()
        self._autocast = any_autocast_enabled()
        self._run = current_run()  # a backward inside the function may recompute: that is another run

    def begin(self, arguments: Arguments) -> None:
        """Number the region's arguments."""
        for index in arguments.tensors:
            tensor = arguments.leaves[index]
            if id(tensor) not in self._numbers:
                self.inputs[self._new(tensor, NOWHERE)] = index

    def broken(self, why: str) -> None:
        """The recording cannot vouch for what happens."""
        if self.why_broken is None:
            self.why_broken = why

    def meet_compiled(self) -> None:
        """What compiled code gives cannot be made again call by call."""
        if not self.is_paused and current_run() is self._run:
            self.broken(CALLS_COMPILED)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call and record it."""
        kwargs = kwargs or {}
        if self.is_paused or self.why_broken is not None or current_run() is not self._run:
            return func(*args, **kwargs)
        if func is ATTENTION:
            return self.look_inside(args, kwargs)
        if func in BACKWARD:
            self.broken(f"{name_of_call(func)} runs inside it")
            return func(*args, **kwargs)
        values = (*args, *kwargs.values())
        if any(isinstance(value, torch.Generator) for value in values):
            self.broken("it draws from its own generator")
        entry = RecordedCall(func)
        given = tensors_in(*values)
        versions = [version_of(tensor) for tensor in given]
        states = read_states(sources_of(given, values))
        if states is None:
            self.broken("a CUDA graph is being captured")
        entry.states = states or []
        outer, self.current = self.current, entry
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = outer
        bumps = ((tensor, version_of(tensor) - version) for tensor, version in zip(given, versions, strict=True))
        written = [(tensor, bump) for tensor, bump in bumps if bump]
        self._record(entry, args, kwargs, result, written)
        return result

    def _record(
        self,
        entry: RecordedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: list[tuple[Tensor, int]],
    ) -> None:
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
        if written:
            self._note_write(entry, written, result)
        entry.outs = [self._number(tensor, len(self.entries)) for tensor in results]
        self.entries.append(entry)

    def _note_write(self, entry: RecordedCall, written: list[tuple[Tensor, int]], result: Any) -> None:
        """A call has overwritten a tensor and gives it back: from here on it is another value, with another number."""
        tensor, bump = written[0]
        number = self._numbers[id(tensor)]
        is_plain = len(written) == 1 and result is tensor and list(entry.links).count(number) == 1
        storage = tensor.untyped_storage()
        others = [other for other in self.tensors if other is not tensor]
        others += [saved for saved, owner, _ in self.saved if owner is not entry]
        if not is_plain or not entry.is_plain() or any(other.untyped_storage() is storage for other in others):
            self.broken(WRITES)
            return
        entry.written, entry.bump = number, bump
        self.overwritten.add(number)
        self._new(tensor, len(self.entries))

    def note_statistics(self, entry: RecordedCall, tensors: list[Tensor] | None) -> None:
        """A call updates statistics without a word: when it is made again, it is given copies of them."""
        numbers = [] if tensors is None else [self._numbers.get(id(tensor), NOWHERE) for tensor in tensors]
        alone = {value for value in (*entry.args, *entry.kwargs.values()) if isinstance(value, Link)}
        if tensors is None or not alone.issuperset(numbers):
            self.broken("it updates running statistics")
        entry.statistics = frozenset(numbers)

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
        if is_tracked(tensor):
            self.broken("it runs a torch.func transform inside")
        is_plain = type(tensor) in self.classes.plain and tensor.layout is torch.strided and not tensor.is_inference()
        if not is_plain or tensor.is_complex():  # a view of complex numbers may be a conjugate one
            self.broken(f"it works on an unusual tensor ({type(tensor).__name__}, {tensor.layout})")
            self.versions.append(0)
        else:
            self.versions.append(tensor._version)  # noqa: SLF001
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

    def note_copy(self, tensor: Tensor, copy: Tensor) -> None:
        """A tensor is cast, or copied without gaps."""
        if self.current is not None and not self.is_paused and current_run() is self._run:
            self.current.copies.append((tensor, ref(copy.untyped_storage())))

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
            for number, (tensor, version) in enumerate(zip(self.tensors, self.versions, strict=True))
            if number not in self.overwritten
        ):
            self.broken(WRITES)

    def results(self, entry: RecordedCall) -> list[Tensor]:
        """What a call gave."""
        return [self.tensors[number] for number in entry.outs]

    def saved_inside(self, entry: RecordedCall) -> list[Tensor]:
        """What a call saved of its own."""
        return [t for t, owner, _ in self.saved if owner is entry and self._trace(t, entry) is None]

    def find_cast(self, tensor: Tensor, entry: RecordedCall) -> Cast | None:
        """How a tensor that a call saved inside is a cast or copy of one of its arguments; None if it is none."""
        if id(tensor) not in self._casts:
            number, is_copied = self._find_origin(tensor, entry)
            cast = None
            if number is not None:
                kind, steps = (tensor.dtype, tensor.shape, tensor.stride()), int(tensor.storage_offset())
                cast = Cast(number, self.entries.index(entry), kind, steps, is_copied=is_copied)
            self._casts[id(tensor)] = cast
        return self._casts[id(tensor)]

    def _find_saved_cast(self, at: int) -> Cast | None:
        tensor, owner, _ = self.saved[at]
        return None if owner is None else self.find_cast(tensor, owner)

    def _find_origin(self, tensor: Tensor, entry: RecordedCall) -> tuple[int | None, bool]:
        """The argument that was cast or copied to this tensor, and whether it was copied.

        Equal values prove nothing: two arguments may both be zero. What is not seen to be cast is a parameter that
        autocast has cast before, and then the only argument that this can be.
        """
        storage, dtype, is_copied = tensor.untyped_storage(), tensor.dtype, False
        for origin, copy in reversed(entry.copies):
            if copy() is storage:
                is_copied = is_copied or origin.dtype == dtype
                number = self._numbers.get(id(origin))
                if number is not None:
                    return (number if number in entry.links else None), is_copied
                storage, dtype = origin.untyped_storage(), origin.dtype
        if storage is not tensor.untyped_storage():
            return None, is_copied
        able = [number for number in dict.fromkeys(entry.links) if may_be_cast(self.tensors[number], tensor)]
        if len(able) != 1 or not (self.tensors[able[0]].is_leaf and self.tensors[able[0]].requires_grad):
            return None, False
        if self.classes.can_compare:
            with without_dispatch_modes(), torch.no_grad():
                made = self.tensors[able[0]].to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                return (able[0] if has_same_bits(made, tensor) else None), False
        return able[0], False

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
        outside = {n for n, maker in enumerate(self._makers) if maker == NOWHERE and n not in self.inputs}
        raw = Program()
        raw.makers = list(self._makers)
        raw.views = self._views(viewing - kept)
        index_of = {id(entry): index for index, entry in enumerate(self.entries)}
        for entry in self.entries:
            call = Call(entry.func, None, is_single=entry.is_single, draws=False)
            call.links = tuple(entry.links)
            raw.calls.append(call)
        held: list[Any] = [None] * len(self.tensors)
        for number in outside.union(*(self.entries[index].outs for index in kept)) - self.overwritten:
            held[number] = self.tensors[number]
        inside: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by call: saved tensors made inside, their places
        for at, (tensor, owner, place) in enumerate(self.saved):
            source = self._trace(tensor, owner)
            base = source.number if isinstance(source, View) else source
            beneath = raw.views[base] if isinstance(base, int) else None
            if beneath is not None:
                base = beneath.number
                source = _view(tensor, self.tensors[base], base)
            if base is None:
                source = HELD
                index = NOWHERE if owner is None else index_of.get(id(owner), NOWHERE)
                if index != NOWHERE:
                    inside[index].append((at, place))
            elif isinstance(base, int) and held[base] is not None:
                source = HELD  # its memory is held anyway, so that the slot may hold it as well
            assert source is not None
            raw.sources.append(source)
            raw.metas.append(read_meta(tensor))
        self._place_inner(raw, inside, kept, held)
        mine = {number for index in kept for number in self.entries[index].outs}
        saved = [tensor for tensor, _, _ in self.saved]
        hold_casts(raw, held, mine - self.overwritten, saved, self._find_saved_cast)
        uses = raw.count_uses(list(range(len(raw.sources))), held)
        if any(uses[number] and self._makers[number] == NOWHERE for number in self.overwritten):
            self.broken(WRITES)  # into what others own, and backward needs it as it was
        return Renumbering(self, raw, held, uses).finish(drawing)

    def _place_inner(
        self, raw: Program, inside: dict[int, list[tuple[int, int]]], kept: set[int], held: list[Any]
    ) -> None:
        """Say where saved tensors come from that calls make inside.

        Of a kept call, casts that are not kept themselves are made again, and the rest is held. Another call is made
        again for what it made inside, unless those are casts alone and nobody asks for its result.
        """
        for index, places in inside.items():
            casts = [self.find_cast(self.saved[at][0], self.entries[index]) for at, _ in places]
            for (at, place), cast in zip(places, casts, strict=True):
                if index in kept:
                    is_kept = id(self.saved[at][0]) in self.kept_inside
                    raw.sources[at] = HELD if is_kept or cast is None else cast
                else:
                    raw.sources[at] = cast if cast is not None and None not in casts else Inner(index, place)
        uses = raw.count_uses(list(range(len(raw.sources))), held)
        made = {raw.makers[number] for number, count in enumerate(uses) if count and held[number] is None} - kept
        for index in made.intersection(inside):
            for at, place in inside[index]:
                raw.sources[at] = Inner(index, place)


def _is_view(tensor: Tensor, other: Tensor) -> bool:
    return other.untyped_storage() is tensor.untyped_storage() and other.dtype == tensor.dtype


def _view(tensor: Tensor, other: Tensor, number: int) -> View:
    steps = int(tensor.storage_offset() - other.storage_offset())
    return View(number, tensor.shape, tensor.stride(), steps, steps * tensor.element_size())


def results_of(result: Any) -> list[Tensor] | None:
    """The tensors that a call gave; None if it gave none, or something that cannot be made again in parts."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)) and type(result) is not torch.Size:
        found = [part for part in result if isinstance(part, Tensor)]
        return found or None
    return None
