"""The mode around forward: keeps the results of single operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.operators import (
    Operator,
    operator_of,
    parts_of,
    storages_in,
    tensors_in,
)
from recollect._core.torch_private.collectives import wait_for, works_in
from recollect._core.torch_private.dispatch import alias_with_version
from recollect._core.torch_private.engine import current_pass
from recollect._core.torch_private.schemas import OpOverload, draws, is_copy, subject_of
from recollect._selective.decisions import DecisionLine
from recollect._selective.kept_call import (
    KeptCall,
    Meta,
    States,
    moved_states,
    read_states,
    refuse_capture,
    sources_of,
    version_of,
)
from recollect._selective.kept_calls import KeptCalls, Key
from recollect._selective.operator_modes import Decide, OperatorMode, Outcome, at_places, metas_of, run_and_listen
from recollect._selective.parameters import moves_parameters


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in parts_of(tensor)]


class _Made:
    """A call that is not kept, remembered in case its result is given a name."""

    __slots__ = ("answer", "inputs", "key", "operator", "result", "states", "versions")

    def __init__(self, key: Key, operator: Operator, answer: Outcome, inputs: list[Meta]) -> None:
        self.key, self.operator, self.answer, self.inputs = key, operator, answer, inputs
        self.states: States | None = None
        self.result: Any = None
        self.versions: list[int] = []


class KeepingMode(OperatorMode):
    """Keeps what `decide` says, while forward runs.

    Args:
        kept_calls: where it goes.
        decide: asked once for each operator, after it ran.
        notes_makers: whether to remember who made which value, for `keep_maker`.
        own: ids of buffers: blocks may update them, which happens once.
        is_exact: whether saved tensors will be compared by value. Running statistics are among them, so what updates
            them must run again; otherwise they are better updated once.
        tracks_memory: whether to know which memory was taken by the region itself, in case a collective fills some.
            Where it is not known, what it was filled with is copied.
        ops: the operators to look at; None for all.
        saved: grows with each tensor that the region saves.
        proves: whether to copy what is kept, and see at the end that nothing wrote into it unseen: `ops` has what
            most such writes are made with (`Decisions.ops_to_prove`), but need not have all.
        note_copy: told of each cast and copy: what of, and what came of it.

    Attributes:
        saw_backward: whether the function itself runs a backward pass.
        saw_wrappers: whether operators ran on tensors that wrap others.
    """

    def __init__(  # noqa: PLR0913 (of which most callers give few)
        self,
        kept_calls: KeptCalls,
        decide: Decide,
        *,
        notes_makers: bool = False,
        own: frozenset[int] = frozenset(),
        is_exact: bool = False,
        tracks_memory: bool = False,
        ops: frozenset[Any] | None = None,
        saved: Sequence[Any] = (),
        proves: bool = False,
        note_copy: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__(kept_calls, ops)
        self._decide, self._is_exact, self._saved, self.proves = decide, is_exact, saved, proves
        self._own, self._note_copy = own, note_copy
        self._pass = current_pass()
        self.saw_backward = self.wrote_outside = self.saw_wrappers = False
        self._made_inside: list[ref[Any]] = []
        self._storages: dict[int, ref[Any]] | None = {} if tracks_memory else None
        self._makers: list[_Made] | None = [] if notes_makers else None

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: C901, PLR0912
        """Run the operator and keep its result if it is to be kept."""
        operator = operator_of(func)
        if current_pass() != self._pass:
            self.saw_backward = True
        if operator.is_ignored or self._looks_away(func, operator, args, kwargs):
            if self.is_paused:
                return self._run_in_block(func, operator, args, kwargs)
            found = func(*args, **kwargs)
            if self._note_copy is not None and is_copy(func, kwargs):
                self._note_copy(args[0], found)
            return found
        if (operator.writes or operator.statistics) and self._kept_calls.calls:
            self._before_write(operator, args, kwargs)
        before = self._states(args, kwargs) if operator.is_random else []
        if before is None and not draws(func, args, kwargs):  # a graph is being captured, which is then no matter
            before = []
        # Compiled code takes its inputs out of the list it is given.
        inputs = None if isinstance(func, OpOverload) else metas_of(args, kwargs)
        subject = subject_of(func, args)
        call = self._counter.next((subject, torch.is_grad_enabled()))  # counted here, like a call that raises
        if self.is_on_wrappers:
            self.saw_wrappers = True
            given, operator = run_and_listen(func, operator, args, kwargs)
        else:
            given = func(*args, **kwargs)
        if self._note_copy is not None and is_copy(func, kwargs):
            self._note_copy(args[0], given)
        result = at_places(operator.writes, args, kwargs) if operator.fills else given
        if self._storages is not None and not (operator.is_view or operator.writes):
            self._storages.update((id(storage), ref(storage)) for storage in storages_in(result))
        answer = self._decide(func, operator, call, args, kwargs, result)
        can_be_kept = operator.can_be_kept and not (self._is_exact and operator.hides_writes)
        if can_be_kept and (answer.is_kept or self._makers is not None):
            made = _Made((subject, torch.is_grad_enabled(), call), operator, answer, inputs or metas_of(args, kwargs))
            if before:
                made.states = moved_states(before, self._states(args, kwargs))
            if isinstance(answer, DecisionLine):
                answer.draws = answer.draws or made.states is not None or before is None
            if answer.is_kept:
                if before is None:
                    refuse_capture(self._kept_calls.region, operator.name)
                kept = self._keep(made, result)
                if operator.is_collective:
                    self._keep_collective(kept, operator, given, result)
                self._kept_calls.tally.count += torch.is_grad_enabled() or operator.is_collective
            elif self._makers is not None:
                # Of several results some may be gone when one is given a name: they are held until forward is over.
                made.result = ref(result) if isinstance(result, Tensor) else result
                made.versions = [version_of(tensor) for tensor in tensors_in(result)]
                self._makers.append(made)
        return given

    def _keep_collective(self, kept: KeptCall, operator: Operator, given: Any, result: Any) -> None:
        """What is kept came from other processes, or is yet to come."""
        kept.talks, kept.fills = True, operator.fills
        kept.wait = partial(wait_for, works_in(given), [] if operator.fills else _parts(kept.tensors))
        kept.is_message = operator.is_message
        known = self._storages or {}
        kept.is_borrowed = operator.fills and not all(
            (weak := known.get(id(storage))) is not None and weak() is storage for storage in storages_in(result)
        )

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._makers = None

    def _run_in_block(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator inside a block that is kept whole: see whether it writes into what others may read."""
        result = func(*args, **kwargs)
        written = [tensor for tensor in at_places(operator.writes, args, kwargs) if id(tensor) not in self._own]
        if written and not moves_parameters():
            for storage in storages_in(written):
                if not any(weak() is storage for weak in self._made_inside):
                    self.wrote_outside = True
        if not operator.is_view:
            self._made_inside.extend(map(ref, storages_in(result)))
        return result

    def begin_block(self, given: list[Tensor]) -> None:
        """A block that is kept whole begins: look away. What it is given is looked after by its versions."""
        self.is_paused, self.wrote_outside = True, False
        self._made_inside = list(map(ref, storages_in(given)))

    def end_block(self) -> bool:
        """It is over; gives whether it wrote into something that it neither made nor was given."""
        self.is_paused, self._made_inside = False, []
        return self.wrote_outside

    def _states(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> States | None:
        return read_states(sources_of(tensors_in(args, kwargs), (*args, *kwargs.values())))

    def _keep(self, made: _Made, result: Any) -> KeptCall:
        kept = KeptCall.of(made.operator.name, result, alias_with_version)
        if type(result) is not Tensor:
            kept.look_inside(tensors_in(result), alias_with_version)
        kept.place, kept.inputs = made.answer.place, made.inputs
        kept.states = made.states if self._kept_calls.preserves else None
        kept.line, kept.position = made.answer, len(self._saved)
        self._kept_calls.offloads = self._kept_calls.offloads or made.answer.is_offloaded
        if made.operator.writes and not made.operator.fills:  # its own write shows in the version only after this
            kept.copy_out()
        if made.answer.is_written and not made.operator.is_collective:  # which may not have arrived yet
            kept.copy_out()
            kept.is_written = True
        elif self.proves:
            kept.proof = [tensor.detach().clone() for tensor in kept.tensors]
        self._kept_calls.calls[made.key] = kept
        return kept

    def count_calls(self, func: Any, is_tracked: bool) -> int:  # noqa: FBT001
        """How often an operator was called, with grad mode on or off."""
        return self._counter.count((func, is_tracked))

    def prove(self) -> None:
        """Forward is over: note of what the function wrote into, though no version showed it."""
        for kept in self._kept_calls.calls.values():
            if not kept.prove() and isinstance(kept.line, DecisionLine):
                kept.line.is_written = True

    def keep_maker(self, value: Tensor) -> Outcome | None:
        """Keep, after the fact, the operator call that made a value or what it is a view of; gives its answer.

        None if no such call is known: it ran in a kept block or outside of the region, or wrote the value in place.
        """
        storages = storages_in(value)
        for made in reversed(self._makers or ()):
            result = made.result() if isinstance(made.result, ref) else made.result
            if any(one is other for one in storages_in(result) for other in storages):
                if made.versions != [version_of(tensor) for tensor in tensors_in(result)]:
                    return None  # it was written into since: the value is not what the call gave
                if made.key not in self._kept_calls.calls:
                    self._keep(made, result)
                    self._kept_calls.tally.is_late = True
                return made.answer
        return None

    def _before_write(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        storages = storages_in(at_places((*operator.writes, *operator.statistics), args, kwargs))
        for call in self._kept_calls.calls.values():
            if call.shares_memory(storages):
                self._meet_write(call, operator)

    def _meet_write(self, kept: KeptCall, operator: Operator) -> None:
        """An operator is about to write into a kept value."""
        kept.copy_out()
        kept.is_written = True
        if isinstance(kept.line, DecisionLine):
            kept.line.is_written = True  # from the next call on, a copy is kept at once
