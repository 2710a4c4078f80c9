"""Drafts a program from a recording: where each saved tensor comes from, and what must be held for it.

A saved tensor is one that the recording met, a view of one, a cast or copy that a call made of an argument, or
something that a call made inside, for which the call is made again. `renumbering.py` drops what nobody asks for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._recompute.hooks import read_meta
from recollect._selective.casts import hold_casts, may_be_cast
from recollect._selective.kept_call import has_same_bits
from recollect._selective.program import HELD, NOWHERE, Bound, Call, Cast, Inner, Program, Source, View
from recollect._selective.recording import WRITES
from recollect._selective.renumbering import Renumbering

if TYPE_CHECKING:
    from recollect._selective.recording import RecordedCall, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorts:
    """Recorded calls by what is done with them, by their index.

    Attributes:
        kept: those whose results are kept.
        sent: of these, those whose results live elsewhere until backward.
        drawing: those that draw random numbers.
        viewing: those that only view.
    """

    kept: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    drawing: set[int] = field(default_factory=set)
    viewing: set[int] = field(default_factory=set)


class Draft:
    """One recording, after its forward, on the way to a program.

    Attributes:
        recording: the recording; broken where it turns out that it cannot be replayed.
        kept_inside: ids of saved tensors that a policy keeps though calls made them inside.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.kept_inside: set[int] = set()
        self._casts: dict[int, Cast | None] = {}

    def saved_inside(self, entry: RecordedCall) -> list[Tensor]:
        """What a call saved of its own."""
        return [t for t, owner, _ in self.recording.saved if owner is entry and self._trace(t, entry) is None]

    def find_cast(self, tensor: Tensor, entry: RecordedCall) -> Cast | None:
        """How a tensor that a call saved inside is a cast or copy of one of its arguments; None if it is none."""
        if id(tensor) not in self._casts:
            number, is_copied = self._find_origin(tensor, entry)
            cast = None
            if number is not None:
                kind, steps = (tensor.dtype, tensor.shape, tensor.stride()), int(tensor.storage_offset())
                cast = Cast(number, self.recording.entries.index(entry), kind, steps, is_copied=is_copied)
            self._casts[id(tensor)] = cast
        return self._casts[id(tensor)]

    def _find_saved_cast(self, at: int) -> Cast | None:
        tensor, owner, _ = self.recording.saved[at]
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
                number = self.recording.numbers.get(id(origin))
                if number is not None:
                    return (number if number in entry.links else None), is_copied
                storage, dtype = origin.untyped_storage(), origin.dtype
        if storage is not tensor.untyped_storage():
            return None, is_copied
        tensors = self.recording.tensors
        able = [number for number in dict.fromkeys(entry.links) if may_be_cast(tensors[number], tensor)]
        if len(able) != 1 or not (tensors[able[0]].is_leaf and tensors[able[0]].requires_grad):
            return None, False
        if self.recording.classes.can_compare:
            with without_dispatch_modes(), torch.no_grad():
                made = tensors[able[0]].to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                return (able[0] if has_same_bits(made, tensor) else None), False
        return able[0], False

    def _trace(self, tensor: Tensor, entry: RecordedCall | None) -> Source | None:
        """The number of a saved tensor, or of what it is a view of; None if it was made inside its call."""
        number = self.recording.numbers.get(id(tensor))
        if number is not None:
            return number
        if entry is not None:
            for number in (*entry.outs, *entry.links):
                if _is_view(tensor, self.recording.tensors[number]):
                    return _view(tensor, self.recording.tensors[number], number)
        return None

    def _views(self, viewing: set[int]) -> list[View | None]:
        """For each number, what it is a view of, seen through views of views, if the calls that made them only view."""
        tensors = self.recording.tensors
        views: list[View | None] = [None] * len(tensors)
        for index in sorted(viewing):
            entry = self.recording.entries[index]
            for number in entry.outs:
                tensor = tensors[number]
                for link in entry.links:
                    base = views[link]
                    root = link if base is None else base.number
                    other = tensors[root]
                    if root != number and self.recording.makers[number] == index and _is_view(tensor, other):
                        views[number] = _view(tensor, other, root)
                        break
        return views

    def program(self, sorts: Sorts) -> tuple[Program, Bound]:
        """What replay needs so that results of these calls are kept, and what this execution has of it."""
        recording, kept = self.recording, sorts.kept
        outside = {n for n, maker in enumerate(recording.makers) if maker == NOWHERE and n not in recording.inputs}
        raw = Program()
        raw.makers = list(recording.makers)
        raw.views = self._views(sorts.viewing - kept)
        index_of = {id(entry): index for index, entry in enumerate(recording.entries)}
        for entry in recording.entries:
            call = Call(entry.func, None, is_single=entry.is_single, draws=False)
            call.links = tuple(entry.links)
            raw.calls.append(call)
        held: list[Any] = [None] * len(recording.tensors)
        for number in outside.union(*(recording.entries[index].outs for index in kept)) - recording.overwritten:
            held[number] = recording.tensors[number]
        sent = {number for index in sorts.sent for number in recording.entries[index].outs if held[number] is not None}
        inside: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by call: saved tensors made inside, their places
        for at, (tensor, owner, place) in enumerate(recording.saved):
            source = self._trace(tensor, owner)
            base = source.number if isinstance(source, View) else source
            beneath = raw.views[base] if isinstance(base, int) else None
            if beneath is not None:
                base = beneath.number
                source = _view(tensor, recording.tensors[base], base)
            if base is None:
                source = HELD
                index = NOWHERE if owner is None else index_of.get(id(owner), NOWHERE)
                if index != NOWHERE:
                    inside[index].append((at, place))
            elif isinstance(base, int) and held[base] is not None and base not in sent:
                source = HELD  # its memory is held anyway, so that the slot may hold it as well
            assert source is not None
            raw.sources.append(source)
            raw.metas.append(read_meta(tensor))
        self._place_inner(raw, inside, kept, held)
        mine = {number for index in kept for number in recording.entries[index].outs}
        saved = [tensor for tensor, _, _ in recording.saved]
        hold_casts(raw, held, mine - recording.overwritten - sent, saved, self._find_saved_cast)
        uses = raw.count_uses(list(range(len(raw.sources))), held)
        if any(uses[number] and recording.makers[number] == NOWHERE for number in recording.overwritten):
            recording.broken(WRITES)  # into what others own, and backward needs it as it was
        raw.sent = frozenset(sent)
        return Renumbering(recording, raw, held, uses).finish(sorts.drawing)

    def _place_inner(
        self, raw: Program, inside: dict[int, list[tuple[int, int]]], kept: set[int], held: list[Any]
    ) -> None:
        """Say where saved tensors come from that calls make inside.

        Of a kept call, casts that are not kept themselves are made again, and the rest is held. Another call is made
        again for what it made inside, unless those are casts alone and nobody asks for its result.
        """
        for index, places in inside.items():
            casts = [self.find_cast(self.recording.saved[at][0], self.recording.entries[index]) for at, _ in places]
            for (at, place), cast in zip(places, casts, strict=True):
                if index in kept:
                    is_kept = id(self.recording.saved[at][0]) in self.kept_inside
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
