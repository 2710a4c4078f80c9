"""Turns a recording into a program: only what replay needs keeps a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recollect._selective.program import (
    NOWHERE,
    Bound,
    Call,
    Cast,
    HeldCast,
    Inner,
    Listed,
    Numbered,
    Program,
    Source,
    View,
    flags_of,
    hold,
)

if TYPE_CHECKING:
    from recollect._selective.recorded import RecordedCall
    from recollect._selective.recording import Recording


class Renumbering:
    """One recording, how often each of its numbers is asked for, and the numbers that are left."""

    def __init__(self, recording: Recording, raw: Program, held: list[Any], uses: list[int]) -> None:
        self._recording, self._raw, self._held, self._uses = recording, raw, held, uses
        self._in_cast = {cast.number for cast in raw.held_casts.values()}  # what is held of these are casts
        needed = {n for n, count in enumerate(uses) if count}
        # Views have numbers too: not to be made, but to be known again where a call takes them.
        needed |= {n for n, view in enumerate(raw.views) if view is not None and view.number in needed}
        self._new = {number: new for new, number in enumerate(sorted(needed))}

    def finish(self, drawing: set[int]) -> tuple[Program, Bound]:  # noqa: C901 (one pass over each list)
        """The program, and what this execution has of it; calls that draw are given by index."""
        recording, raw, held, uses, new = self._recording, self._raw, self._held, self._uses, self._new
        program = Program()
        program.makers = [raw.makers[number] for number in new]
        program.uses = [uses[number] for number in new]
        program.metas = raw.metas
        program.views = [self._view(raw.views[number]) for number in new]
        program.inputs = {new[number]: leaf for number, leaf in recording.inputs.items() if number in new}
        bound = Bound(len(new), len(recording.entries))
        for number, place in new.items():
            is_cast = number in self._in_cast
            bound.versions[place] = held[number]._version if is_cast else recording.versions[number]  # noqa: SLF001
            if held[number] is not None and raw.views[number] is None:
                bound.held[place] = hold(held[number])
        inner_calls = {source.call for source in raw.sources if isinstance(source, Inner)}
        made_again = inner_calls | {
            raw.makers[n] for n in new if raw.makers[n] != NOWHERE and held[n] is None and raw.views[n] is None
        }
        casting = {source.call for source in raw.sources if isinstance(source, Cast)}
        for index, entry in enumerate(recording.entries):
            call = self._call(
                entry, draws=index in drawing, is_recorded=index in made_again, is_casting=index in casting
            )
            call.is_identity = any(raw.makers[number] != index for number in entry.outs)
            if index in made_again:
                bound.arguments[index] = self._arguments(call, entry)
                if call.draws:
                    bound.states[index] = entry.states
            if index in inner_calls or index in casting:
                flags = zip(entry.links, entry.needs_grad, strict=True)
                call.needs_grad = tuple(flag for number, flag in flags if call.is_general or number in new)
            call.written, call.bump = new.get(entry.written, NOWHERE), entry.bump
            call.scratch = frozenset(new[number] for number in entry.statistics if number in new)
            call.flags = flags_of(entry.args, entry.kwargs) if call.scratch else ()
            call.is_overwritten = not recording.overwritten.isdisjoint(entry.outs)
            call.settle()
            program.calls.append(call)
        program.sent = frozenset(new[number] for number in raw.sent if number in new)
        bases = {view.number for view in program.views if view is not None}
        for place, source in enumerate(raw.sources):
            renumbered = self._source(source)
            if isinstance(source, Inner):
                program.inner.setdefault(source.call, {})[source.place] = place
            program.sources.append(renumbered)
            if isinstance(renumbered, View):
                bases.add(renumbered.number)
        program.held_casts = {
            at: HeldCast(new[cast.number], cast.kind, cast.shape, cast.stride, cast.steps)
            for at, cast in raw.held_casts.items()
            if cast.number in new
        }
        program.bases, program.draws = frozenset(bases), bool(drawing)
        for call in program.calls:
            call.is_base = call.number in bases
        read = {link for call in program.calls if call.is_recorded for link in call.links if link not in call.scratch}
        program.scratch = frozenset(link for call in program.calls for link in call.scratch) - read
        return program, bound

    def _source(self, source: Source) -> Source:
        if isinstance(source, int):
            return self._new[source]
        if isinstance(source, Cast):
            return Cast(self._new[source.number], source.call, source.kind, source.steps, is_copied=source.is_copied)
        return self._view(source) or source

    def _view(self, source: Any) -> View | None:
        if not isinstance(source, View):
            return None
        return View(self._new[source.number], source.shape, source.stride, source.steps, source.delta)

    def _call(self, entry: RecordedCall, *, draws: bool, is_recorded: bool, is_casting: bool) -> Call:
        recording, new = self._recording, self._new
        results = recording.results(entry)
        shapes = results[0].shape if entry.is_single else [(tensor.shape, tensor.dtype) for tensor in results]
        call = Call(entry.func, shapes, is_single=entry.is_single, draws=draws)
        call.dtype, call.place = results[0].dtype, entry.place
        call.sources = [source for source, _ in entry.states]
        call.outs = [new.get(number, NOWHERE) for number in entry.outs]
        views = {place: self._view(self._raw.views[number]) for place, number in enumerate(entry.outs) if number in new}
        call.views = {place: view for place, view in views.items() if view is not None} or None
        call.kept = frozenset(
            place
            for place in views
            if views[place] is None
            and self._held[entry.outs[place]] is not None
            and entry.outs[place] not in self._in_cast
        )
        call.is_recorded = is_recorded
        knows_all = all(number in new for number in entry.links)
        call.is_checked = is_recorded or is_casting or (call.views is not None and knows_all)
        if call.is_checked:
            assert knows_all or is_casting
            call.links = tuple(new.get(number, NOWHERE) for number in entry.links)
            call.size = len(entry.args)
            values = (*entry.args, *entry.kwargs.values())
            call.is_general = any(isinstance(value, Listed) for value in values)
            if not call.is_general:
                call.names = tuple(name for name, value in entry.kwargs.items() if isinstance(value, Numbered))
                places = enumerate((*entry.args, *(entry.kwargs[name] for name in call.names)))
                links = [(place, new.get(value)) for place, value in places if isinstance(value, Numbered)]
                call.tensors = tuple((place, number) for place, number in links if number is not None)
                call.others = tuple(p for p, value in enumerate(entry.args) if not isinstance(value, Numbered))
        return call

    def _arguments(self, call: Call, entry: RecordedCall) -> Any:
        if call.is_general:
            args = [self._renumber(value) for value in entry.args]
            return args, {name: self._renumber(value) for name, value in entry.kwargs.items()}
        if not call.others and not entry.kwargs:
            return None
        others = [entry.args[place] for place in call.others]
        return others, {name: value for name, value in entry.kwargs.items() if name not in call.names}

    def _renumber(self, value: Any) -> Any:
        if isinstance(value, Numbered):
            return Numbered(self._new[value])
        if isinstance(value, Listed):
            return Listed(value.kind, [self._renumber(item) for item in value.items])
        return value
