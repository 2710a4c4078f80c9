"""Learns a program: records every call of torch that one forward makes, and what it saves, then keeps what is needed.

The recorder is a torch-function mode, which sees each call of torch once, with its arguments (3 µs; a dispatch mode
sees every operator beneath, at four times the cost). It runs at the first call of its kind only; `following.py` follows
the program afterwards. Until the forward is over it holds what the program will hold: tensors from outside, kept
results, and what is cast of them. Of all others it remembers outlines (`outlines.py`), so that the first call fits
where later ones do.

What a recording cannot vouch for breaks it, and the region is then recomputed by running its function again: writes in
place where something else shares the memory, attributes set, tensors that are not plain, memory left unfilled for
others to write, arguments that may change, generators of the user's own, autocast switched, collectives, a backward
inside, calls that are kept only in part. What is left is replayed once and compared, to the bit, before it is
believed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.argument_text import with_article
from recollect._core.operators import UNFILLED, storages_in, tensors_in
from recollect._core.pytree import Arguments
from recollect._core.scope import current_run
from recollect._core.torch_private.ambient import FunctionMode, any_autocast_enabled, without_function_modes
from recollect._core.torch_private.composites import ATTENTION
from recollect._core.torch_private.functorch import is_tracked
from recollect._recompute.hooks import read_meta
from recollect._selective.casts import find_cast, is_weight
from recollect._selective.kept_call import read_states, sources_of, version_of
from recollect._selective.outlines import MetStorages, Outline, share_memory
from recollect._selective.program import (
    NOWHERE,
    Cast,
    Numbered,
    Unfixed,
    template_of,
)
from recollect._selective.recorded import RecordedCall, SavedTensor
from recollect._selective.tensor_classes import TensorClasses

BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_UNFILLED = frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in UNFILLED if hasattr(owner, name))
WRITES = "it writes into tensors in place"
"""Why a recording is broken where something else shares the memory, or needs what was overwritten."""
CALLS_COMPILED = "it calls compiled code, which can only run again in full"
"""Why it is broken where torch.compile has made some of the calls one."""
_GRAD = getattr(Tensor.grad, "__get__")  # noqa: B009 (a descriptor, whatever its annotation says)


def name_of_call(func: Any) -> str:
    """A function of torch in words; an attribute by its name."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", None) or getattr(func, "__name__", func))


class Recording(FunctionMode):
    """Records one forward.

    Args:
        classes: what plain tensors are here.
        holds_all: whether to hold every tensor, because a policy may keep some after the fact.
        keeps_casts: whether the policy keeps what autocast makes of parameters.

    Attributes:
        entries: its calls that gave tensors.
        tensors: all tensors it met, by number, or their outlines.
        saved: each saved tensor.
        versions: of the tensors when they were met.
        makers: which call made each of them; `NOWHERE` for what came from outside.
        numbers: of the tensors, by id.
        inputs: for numbers of the region's arguments, which leaf of them each is.
        overwritten: numbers whose tensors have another value now, under another number.
        why_broken: why it cannot be believed; None if it can.
        keeps_casts: as given.
    """

    def __init__(self, classes: TensorClasses, *, holds_all: bool = False, keeps_casts: bool = False) -> None:
        super().__init__()
        self.classes, self.keeps_casts = classes, keeps_casts
        self.entries: list[RecordedCall] = []
        self.tensors: list[Tensor | Outline] = []
        self.saved: list[SavedTensor] = []
        self.why_broken: str | None = None
        self.is_paused = False
        self.current: RecordedCall | None = None
        self.versions: list[int] = []
        self.makers: list[int] = []
        self.inputs: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.overwritten: set[int] = set()
        self._holds_all = holds_all or not classes.can_compare  # tensors without values take no memory
        self._refs: list[ref[Tensor]] = []
        self._memories = MetStorages()
        self._held: set[int] = set()  # ids of storages that are held
        self._packed: list[tuple[Tensor, RecordedCall, int]] = []  # saved by calls that are not over yet
        self._autocast = any_autocast_enabled()
        self._run = current_run()  # a backward inside the function may recompute: that is another run

    def begin(self, arguments: Arguments) -> None:
        """Number the region's arguments."""
        for index in arguments.tensors:
            tensor = arguments.leaves[index]
            if self.number_of(tensor) is None:
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
        if self.why_broken is not None and self.tensors:
            self.forget()
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
        self._check_given(given, versions)
        states = read_states(sources_of(given, values))
        if states is None:
            self.broken("a CUDA graph is being captured")
        entry.states = states or []
        outer, self.current = self.current, entry
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self.broken(f"{name_of_call(func)} raised inside it")
            raise
        finally:
            self.current = outer
        entry.states = [(source, state) for source, state in entry.states if not source.same(state, source.read())]
        bumps = ((tensor, version_of(tensor) - version) for tensor, version in zip(given, versions, strict=True))
        written = [(tensor, bump) for tensor, bump in bumps if bump]
        self._record(entry, args, kwargs, result, written)
        if outer is None:
            self._settle_saved()
        entry.copies = []
        return result

    def _check_given(self, given: list[Tensor], versions: list[int]) -> None:
        """Break if something was written into unseen since it was met."""
        for tensor, version in zip(given, versions, strict=True):
            number = self.number_of(tensor)
            if number is not None and self.versions[number] != version:
                self.broken(WRITES)

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
        entry.args = [self._template(value, entry) for value in args]
        entry.kwargs = {name: self._template(value, entry) for name, value in kwargs.items()}
        if written:
            self._note_write(entry, written, result)
        entry.outs = [self._number(tensor, len(self.entries), is_held=entry.is_kept) for tensor in results]
        if entry.is_kept and self.why_broken is None:
            for number, tensor in zip(entry.outs, results, strict=True):  # one that was met before is held from now on
                self.tensors[number] = self._remember(tensor, is_held=True)
        self.entries.append(entry)

    def _note_write(self, entry: RecordedCall, written: list[tuple[Tensor, int]], result: Any) -> None:
        """A call has overwritten a tensor and gives it back: from here on it is another value, with another number."""
        tensor, bump = written[0]
        number = self.number_of(tensor)
        assert number is not None, "its arguments have numbers"
        is_plain = len(written) == 1 and result is tensor and list(entry.links).count(number) == 1
        mine = self.tensors[number]
        others = [other for other, weak in zip(self.tensors, self._refs, strict=True) if weak() is not tensor]
        others += [saved.tensor for saved in self.saved]
        if not is_plain or not entry.is_plain() or any(share_memory(mine, other) for other in others):
            self.broken(WRITES)
            return
        entry.written, entry.bump = number, bump
        self.overwritten.add(number)
        self._new(tensor, len(self.entries), is_held=entry.is_kept)

    def note_statistics(self, entry: RecordedCall, tensors: list[Tensor] | None) -> None:
        """A call updates statistics without a word: when it is made again, it is given copies of them."""
        known = [] if tensors is None else map(self.number_of, tensors)
        numbers = [NOWHERE if number is None else number for number in known]
        alone = {value for value in (*entry.args, *entry.kwargs.values()) if isinstance(value, Numbered)}
        if tensors is None or not alone.issuperset(numbers):
            self.broken("it updates running statistics")
        entry.statistics = frozenset(numbers)

    def _template(self, value: Any, entry: RecordedCall) -> Any:
        def name(tensor: Tensor) -> int:
            entry.links.append(self._number(tensor, NOWHERE, is_held=True))
            entry.needs_grad.append(tensor.requires_grad)
            return entry.links[-1]

        try:
            return template_of(value, name)
        except Unfixed:
            self.broken(f"a call of torch takes {with_article(type(value).__name__)}, which may change afterwards")
            return None

    def _new(self, tensor: Tensor, maker: int, *, is_held: bool = True) -> int:
        number = self.numbers[id(tensor)] = len(self.tensors)
        self.makers.append(maker)
        self._refs.append(ref(tensor))
        if is_tracked(tensor):
            self.broken("it runs a torch.func transform inside")
        is_plain = type(tensor) in self.classes.plain and tensor.layout is torch.strided and not tensor.is_inference()
        if not is_plain or tensor.is_complex():  # a view of complex numbers may be a conjugate one
            self.broken(f"it works on an unusual tensor ({type(tensor).__name__}, {tensor.layout})")
            self.versions.append(0)
            self.tensors.append(tensor)
        else:
            self.versions.append(tensor._version)  # noqa: SLF001
            self.tensors.append(tensor if self.why_broken else self._remember(tensor, is_held=is_held))
        return number

    def _remember(self, tensor: Tensor, *, is_held: bool) -> Tensor | Outline:
        """A tensor that is held, or shares memory with one that is; of others the outline."""
        if self._holds_all:
            return tensor
        if is_held:
            self._held.add(id(tensor.untyped_storage()))
        return tensor if id(tensor.untyped_storage()) in self._held else self._memories.outline(tensor)

    def number_of(self, tensor: Tensor) -> int | None:
        """The number that a tensor has by now; None if it was not met."""
        number = self.numbers.get(id(tensor))
        return number if number is not None and self._refs[number]() is tensor else None

    def _number(self, tensor: Tensor, maker: int, *, is_held: bool) -> int:
        number = self.number_of(tensor)
        return self._new(tensor, maker, is_held=is_held) if number is None else number

    def hold(self, result: Any) -> None:
        """The running call is kept, because of this result of an operator beneath."""
        if self.current is not None:
            self.current.is_kept = True
            self._held.update(map(id, storages_in(result)))

    def note_saved(self, tensor: Tensor) -> None:
        """A tensor is saved."""
        if self.why_broken is not None:
            return
        entry = self.current
        if entry is None:
            with without_function_modes():  # or what is asked of it here would be recorded
                self._add_saved(tensor, None, 0)
        else:
            self._packed.append((tensor, entry, entry.saved))
            entry.saved += 1

    def _settle_saved(self) -> None:
        """A call is over: by now, what it saved is filled."""
        packed, self._packed = self._packed, []
        if self.why_broken is None:
            for tensor, entry, place in packed:
                self._add_saved(tensor, entry, place)

    def _add_saved(self, tensor: Tensor, owner: RecordedCall | None, place: int) -> None:
        number = self.number_of(tensor)
        base = self._find_base(tensor, owner) if number is None and owner is not None else number
        cast = find_cast(self, tensor, owner) if base is None and owner is not None else None
        if base is not None:
            is_held = False  # unless its base is
        elif cast is not None:
            is_held = self._may_hold_cast(cast)
        else:
            is_held = owner is None or owner.is_kept
        kept = self._remember(tensor, is_held=is_held)
        bits = self._memories.read_bits(tensor, kept) if isinstance(kept, Outline) else None
        is_base = base is not None and base == number
        self.saved.append(SavedTensor(kept, owner, place, base, is_base, read_meta(tensor), bits, cast))

    def _may_hold_cast(self, cast: Cast) -> bool:
        """Whether a cast may be held: of a weight, or in place of what was cast, if kept and no smaller."""
        origin, (dtype, *_) = self.tensors[cast.number], cast.kind
        if is_weight(origin):
            return self.keeps_casts
        is_kept = self.makers[cast.number] != NOWHERE and isinstance(origin, Tensor)
        return is_kept and dtype.itemsize <= origin.element_size()

    def _find_base(self, tensor: Tensor, entry: RecordedCall) -> int | None:
        """The result or argument of a call that a tensor is a view of."""
        for number in (*entry.outs, *entry.links):
            other = self.tensors[number]
            if other.dtype == tensor.dtype and share_memory(tensor, other):
                return number
        return None

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
        self.tensors, self.saved, self.entries, self.numbers = [], [], [], {}
        self.versions, self.makers, self._refs, self._packed = [], [], [], []
        self._held, self._memories = set(), MetStorages()

    # After forward.
    def check_versions(self) -> None:
        """Break if anything was written into in place."""
        if self.why_broken is None and any(
            (tensor := weak()) is not None and tensor._version != version  # noqa: SLF001
            for number, (weak, version) in enumerate(zip(self._refs, self.versions, strict=True))
            if number not in self.overwritten
        ):
            self.broken(WRITES)

    def results(self, entry: RecordedCall) -> list[Tensor | Outline]:
        """What a call gave."""
        return [self.tensors[number] for number in entry.outs]


def results_of(result: Any) -> list[Tensor] | None:
    """The tensors that a call gave; None if it gave none, or something that cannot be made again in parts."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)) and type(result) is not torch.Size:
        found = [part for part in result if isinstance(part, Tensor)]
        return found or None
    return None
