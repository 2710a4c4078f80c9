"""Asks a policy about every call of one forward, and sorts what was recorded of it by what the policy said."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.decisions import Decision, Site
from recollect._core.operators import (
    Operator,
    count_flops,
    storages_in,
    tensors_in,
)
from recollect._core.places import Places
from recollect._core.torch_private.schemas import OpOverload, arguments_named
from recollect._selective.decisions import (
    NOT_SAVED,
    RUNS_AGAIN,
    DecisionLine,
    Decisions,
    bytes_of,
    shapes_of,
    strongest,
)
from recollect._selective.drafting import Draft, Sorts
from recollect._selective.operator_modes import at_places
from recollect._selective.outlines import Outline
from recollect._selective.recorded import RecordedCall
from recollect._selective.recording import WRITES, Recording, name_of_call


class _Beneath:
    """An operator that ran beneath a call of torch, the memory of what it made, and the statistics that it updates."""

    __slots__ = ("line", "operator", "statistics", "storages")

    def __init__(self, operator: Operator, line: DecisionLine, storages: list[ref[Any]]) -> None:
        self.operator, self.line, self.storages = operator, line, storages
        self.statistics: list[Tensor] | None = None  # nobody knows


class Asker:
    """Asks the policy during one forward, or looks up what it said; knows names, and what follows a choice.

    Args:
        decisions: what was decided so far.
        places: finds where in the user's code a call is.
        scopes: the names around it.
        recording: of the same forward, if there is one.
        is_planned: whether a plan counts on replay. Then results of writes in place can be kept; and of a kept call
            whose result is overwritten, what it saved inside is.
    """

    def __init__(
        self,
        decisions: Decisions,
        places: Places,
        scopes: list[str],
        recording: Recording | None = None,
        *,
        is_planned: bool = False,
    ) -> None:
        self._decisions, self._recording, self._is_planned = decisions, recording, is_planned
        self._beneath: dict[int, list[_Beneath]] = {}  # by the id of a recorded call
        self._places = places
        self._scopes = scopes
        self._index = -1
        self._chosen: list[ref[Any]] = []  # storages of routing results and of what is counted out of them
        self.has_asked = self.saw_higher_order = False

    def decide(self, func: Any, operator: Operator, call: int, args: Any, kwargs: Any, result: Any) -> DecisionLine:  # noqa: PLR0917
        """The line of an operator call: the one of the last time, or a new one."""
        line = self._find(func, operator, call, args, kwargs, result)
        recording = self._recording
        if recording is not None and operator.is_collective:
            recording.broken("it communicates with other processes, which must all do the same")
        if recording is not None and (line.is_kept or line.keeps_write):
            recording.hold(result)
        if recording is not None and recording.current is not None:
            beneath = _Beneath(operator, line, list(map(ref, storages_in(result))))
            if operator.statistics:
                beneath.statistics = find_statistics(func, operator, args, kwargs)
            self._beneath.setdefault(id(recording.current), []).append(beneath)
        return line

    def sort_calls(self, draft: Draft, *, draws: bool) -> Sorts:
        """What is done with each recorded call; breaks the recording where that is unknown."""
        recording, sorts = draft.recording, Sorts()
        for index, entry in enumerate(recording.entries):
            beneath = self._beneath.get(id(entry), [])
            if beneath:
                entry.place = f"{name_of_call(entry.func)}{beneath[0].line.place}"
            kept = [one for one in beneath if one.line.is_kept and one.operator.can_be_kept]
            if any(one.line.keeps_write for one in beneath):
                sorts.kept.add(index)
            for one in beneath:
                if one.operator.hides_writes:
                    recording.note_statistics(entry, one.statistics)
            if draws and any(one.operator.is_random for one in beneath):
                sorts.drawing.add(index)
            if all(one.operator.is_view and not one.operator.writes for one in beneath):
                sorts.viewing.add(index)
            if kept:
                sorts.kept.add(index)
                if all(one.line.is_offloaded for one in kept):
                    sorts.sent.add(index)
                self._check_kept(draft, entry, beneath, kept)
        return sorts

    def _check_kept(self, draft: Draft, entry: RecordedCall, beneath: list[_Beneath], kept: list[_Beneath]) -> None:
        """Break a recording where only a part of a call is kept, or what is kept is overwritten."""
        recording = draft.recording
        if not self._is_planned and not recording.overwritten.isdisjoint(entry.outs):
            recording.broken(WRITES)  # it is kept as a copy, which is served
        storages = [storage for one in kept for weak in one.storages if (storage := weak()) is not None]
        inside = draft.saved_inside(entry)
        kept_inside = {at for at, saved in inside if _is_in(saved.tensor, storages)}
        draft.kept_inside |= kept_inside
        results = recording.results(entry)
        # A linear layer may add its bias to a kept product: what it gives takes as much, and is held instead.
        size = sum(tensor.numel() * tensor.element_size() for tensor in results)
        is_whole = all(_is_in(tensor, storages) for tensor in results) or size <= sum(
            storage.nbytes() for storage in storages
        )
        if not is_whole or any(saved.cast is None for at, saved in inside if at not in kept_inside):
            names = ", ".join(dict.fromkeys(one.operator.name for one in beneath))
            recording.broken(f"{name_of_call(entry.func)} runs {names}, and only some of these are kept")

    def _find(self, func: Any, operator: Operator, call: int, args: Any, kwargs: Any, result: Any) -> DecisionLine:  # noqa: PLR0917
        self._index += 1
        lines, index = self._decisions.lines, self._index
        shapes = shapes_of(result)
        if index < len(lines):
            line = lines[index]
            if line.key is func and line.shapes == shapes:
                line.matched += 1
                if line.is_routing:
                    self._note_choice(result)
                return line
            del lines[index:]  # another way through the function: ask from here on
        line = self._ask(func, operator, call, args, kwargs, result)
        line.shapes = shapes
        lines.append(line)
        return line

    def _ask(self, func: Any, operator: Operator, call: int, args: Any, kwargs: Any, result: Any) -> DecisionLine:  # noqa: PLR0917
        self.has_asked = True
        place = self._places.find(4)
        if not isinstance(func, OpOverload):
            self._decisions.may_record, self.saw_higher_order = False, True
        is_routing = operator.is_routing or self._follows_choice(args, kwargs, result)
        if is_routing:
            self._note_choice(result)
        flops = count_flops(operator, args, kwargs, result)
        outputs: list[Any] = list(tensors_in(result)) or [None]
        sites = tuple(
            Site(
                region=self._decisions.region,
                op=operator.name,
                call=call,
                output=number,
                module=place.module,
                scopes=tuple(self._scopes),
                shape=tuple(output.shape) if output is not None else (),
                dtype=str(output.dtype).removeprefix("torch.") if output is not None else "",
                bytes=bytes_of(output) if output is not None else 0,
                flops=flops,
                is_random=operator.is_random,
                is_routing=is_routing,
                is_collective=operator.is_collective,
            )
            for number, output in enumerate(outputs)
        )
        # Nobody is asked about what can only run again: views, most writes in place, memory yet to be filled.
        if not operator.can_be_kept:
            verdicts = [RUNS_AGAIN]
        elif self._decisions.policy.keeps_what_pays and not (
            torch.is_grad_enabled() or is_routing or operator.is_collective
        ):
            verdicts = [NOT_SAVED]
        else:
            verdicts = [self._decisions.judge(site) for site in sites]
        chosen = strongest(verdicts)
        writes = self._is_planned and len(operator.writes) == 1 and operator.is_view and not operator.can_be_kept
        return DecisionLine(
            key=func,
            shapes=(),
            what=operator.name,
            decision=chosen.decision,
            by=chosen.by,
            sites=sites,
            place=place,
            bytes=sum(site.bytes for site in sites),
            matched=1,
            number=(func, torch.is_grad_enabled(), call),
            is_routing=is_routing,
            fills=operator.fills,
            keeps_write=writes and strongest([self._decisions.judge(one) for one in sites]).decision is Decision.SAVE,
        )

    def _note_choice(self, result: Any) -> None:
        self._chosen.extend(map(ref, storages_in(result)))

    def _follows_choice(self, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether whole numbers or truths are counted out of routing results: indices, masks, counts, offsets."""
        if not self._chosen:
            return False
        made = tensors_in(result)
        if not made or any(tensor.is_floating_point() or tensor.is_complex() for tensor in made):
            return False
        chosen = [storage for weak in self._chosen if (storage := weak()) is not None]
        given = storages_in(args, kwargs)
        return any(one is other for one in given for other in chosen)


def _is_in(tensor: Tensor | Outline, storages: list[Any]) -> bool:
    return any(tensor.untyped_storage() is storage for storage in storages)


def find_statistics(func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The running statistics that a call updates; none if it only reads them."""
    training = arguments_named(func, "training")
    values = [args[at] if at < len(args) else kwargs.get(name) for at, name in training]
    return at_places(operator.statistics, args, kwargs) if not values or any(values) else []
