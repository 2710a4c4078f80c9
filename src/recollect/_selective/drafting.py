"""Drafts a program from a recording: where each saved tensor comes from, and what must be held for it.

A saved tensor is one that the recording met, a view of one, a cast or copy that a call made of an argument, or
something that a call made inside, for which the call is made again. `renumbering.py` drops what nobody asks for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect._selective.casts import hold_casts, hold_weight_casts
from recollect._selective.outlines import Outline, share_memory
from recollect._selective.program import HELD, NOWHERE, Bound, Call, Inner, Program, Source, View
from recollect._selective.recording import WRITES
from recollect._selective.renumbering import Renumbering

if TYPE_CHECKING:
    from recollect._selective.recorded import RecordedCall, SavedTensor
    from recollect._selective.recording import Recording


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
        kept_inside: those saved tensors that a policy keeps though calls made them inside, by index.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.kept_inside: set[int] = set()

    def saved_inside(self, entry: RecordedCall) -> list[tuple[int, SavedTensor]]:
        """What a call saved of its own, by index."""
        return [(at, one) for at, one in enumerate(self.recording.saved) if one.owner is entry and one.base is None]

    def _trace(self, saved: SavedTensor) -> Source | None:
        """The number of a saved tensor, or of what it is a view of; None if it was made inside its call."""
        if saved.base is None or saved.is_base:
            return saved.base
        return _view(saved.tensor, self.recording.tensors[saved.base], saved.base)

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
        for at, saved in enumerate(recording.saved):
            source, base = self._trace(saved), saved.base
            beneath = None if base is None else raw.views[base]
            if beneath is not None:
                base = beneath.number
                source = _view(saved.tensor, recording.tensors[base], base)
            if base is None:
                source = HELD
                index = NOWHERE if saved.owner is None else index_of.get(id(saved.owner), NOWHERE)
                if index != NOWHERE:
                    inside[index].append((at, saved.place))
            elif held[base] is not None and base not in sent:
                source = HELD  # its memory is held anyway, so that the slot may hold it as well
            assert source is not None
            raw.sources.append(source)
            raw.metas.append(saved.meta)
        self._place_inner(raw, inside, kept, held)
        mine = {number for index in kept for number in recording.entries[index].outs}
        if recording.keeps_casts:
            hold_weight_casts(raw, held, recording.saved)
        hold_casts(raw, held, mine - recording.overwritten - sent, recording.saved)
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
            casts = [self.recording.saved[at].cast for at, _ in places]
            for (at, place), cast in zip(places, casts, strict=True):
                if index in kept:
                    raw.sources[at] = HELD if at in self.kept_inside or cast is None else cast
                else:
                    raw.sources[at] = cast if cast is not None and None not in casts else Inner(index, place)
        uses = raw.count_uses(list(range(len(raw.sources))), held)
        made = {raw.makers[number] for number, count in enumerate(uses) if count and held[number] is None} - kept
        for index in made.intersection(inside):
            for at, place in inside[index]:
                raw.sources[at] = Inner(index, place)


def _is_view(tensor: Tensor | Outline, other: Tensor | Outline) -> bool:
    return other.dtype == tensor.dtype and share_memory(tensor, other)


def _view(tensor: Tensor | Outline, other: Tensor | Outline, number: int) -> View:
    steps = int(tensor.storage_offset() - other.storage_offset())
    return View(number, tensor.shape, tensor.stride(), steps, steps * tensor.element_size())
