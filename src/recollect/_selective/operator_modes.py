"""What keeps single operators: a mode around forward, and one around recomputation that serves them.

At a region's first call, to learn what its policy says (`decisions.py`), they are dispatch modes, which see every
operator and cost some microseconds for each. Once it is known which operators matter, only those are intercepted,
unless somebody's dispatch mode is on: then they are modes again, so that it sees what runs and nothing else. See
docs/design/selective.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self
from weakref import ref

import torch
from torch import Tensor

from recollect._core.errors import MismatchError
from recollect._core.operators import (
    Operator,
    is_cached_cast,
    operator_of,
    parts_of,
    storages_in,
    talking,
    tensors_in,
)
from recollect._core.places import Place, Places
from recollect._core.scope import current_run, is_last_recomputation
from recollect._core.torch_private.collectives import answer, wait_for, works_in
from recollect._core.torch_private.dispatch import DispatchMode, alias_with_version, dispatch_mode_depth
from recollect._core.torch_private.engine import current_pass
from recollect._core.torch_private.intercept import Interception
from recollect._core.torch_private.schemas import OpOverload, count_results
from recollect._recompute.oplog import describe_tensor
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
from recollect._selective.kept_calls import Counter, KeptCalls, Key, Slipped
from recollect._selective.parameters import moves_parameters


class Answer(Protocol):
    """What becomes of an operator's result: a line of `Decisions`, or whatever else says as much.

    Attributes:
        is_written: the function writes into the result afterwards, so that only a copy can be kept.
    """

    place: Place | None
    is_written: bool

    @property
    def is_kept(self) -> bool: ...

    @property
    def is_offloaded(self) -> bool: ...


Decide = Callable[[Any, Operator, int, tuple[Any, ...], dict[str, Any], Any], Answer]
"""Asked of each operator after it ran: the operator, facts about it, which call of it, arguments, result."""


def metas_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Meta]:
    """What tells two calls of an operator apart."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(args, kwargs)]


def _at(places: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments at these positions or of these names."""
    return tensors_in(*(args[position] if position < len(args) else kwargs.get(name) for position, name in places))


def _given(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument that an operator writes into, as it was given; None if it writes into none."""
    for position, name in operator.writes[:1]:
        return args[position] if position < len(args) else kwargs.get(name)
    return None


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in parts_of(tensor)]


class _Made:
    """A call that is not kept, remembered in case its result is given a name."""

    __slots__ = ("answer", "inputs", "key", "operator", "result", "states", "versions")

    def __init__(self, key: Key, operator: Operator, answer: Answer, inputs: list[Meta]) -> None:
        self.key, self.operator, self.answer, self.inputs = key, operator, answer, inputs
        self.states: States | None = None
        self.result: Any = None
        self.versions: list[int] = []


class _OperatorMode(DispatchMode):
    """What both look away from: kept blocks, other recomputations, what autocast may cache, parameters' gathers.

    Attributes:
        ops: the operators that it looks at; None for all.
        saw_gather: whether parameters are gathered inside the region.
    """

    def __init__(self, kept_calls: KeptCalls, ops: frozenset[Any] | None = None) -> None:
        super().__init__()
        self._kept_calls, self.ops = kept_calls, ops
        self._counter = Counter()
        self._run = current_run()  # a backward inside the function may recompute: that is another run
        self.is_paused = self.saw_gather = False
        self._interception: Interception | None = None

    def __enter__(self) -> Self:
        if self.ops is None or dispatch_mode_depth():
            return super().__enter__()
        self._interception = Interception(self.ops, self.meet)
        self._interception.enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._interception is None:
            super().__exit__(exc_type, exc, traceback)
        else:
            interception, self._interception = self._interception, None
            interception.leave()

    def _looks_away(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.ops is not None and func not in self.ops:
            return True
        if self.is_paused or current_run() is not self._run or is_cached_cast(func, args, kwargs):
            return True
        # Parameters are gathered without gradients; whoever does it with them is seen at the collective.
        if (operator.is_collective or not torch.is_grad_enabled()) and moves_parameters():
            self.saw_gather = True
            return True
        return False


class _Overhearing(DispatchMode):
    """Listens to one operator on wrappers, such as distributed tensors: does what it does beneath talk to others?"""

    looks_beneath = True

    def __init__(self) -> None:
        super().__init__()
        self.talks = False

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and note whether it talks."""
        self.talks = self.talks or operator_of(func).is_collective
        return func(*args, **kwargs)


def _run_and_listen(
    func: Callable[..., Any], operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Operator]:
    """Run an operator on wrappers; gives its result, and the operator as it was at this call."""
    with _Overhearing() as heard:
        result = func(*args, **kwargs)
    return result, talking(operator) if heard.talks else operator


class KeepingMode(_OperatorMode):
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
        proves: whether to copy what is kept, and see at the end that nothing wrote into it unseen. A dispatch mode
            changes what some operators are made of, and where only some are looked at, others write past versions:
            `linear` adds its bias in place, to an unsafe view of the product.

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
    ) -> None:
        super().__init__(kept_calls, ops)
        self._decide, self._is_exact, self._saved, self.proves = decide, is_exact, saved, proves
        self._own = own
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
            return self._run_in_block(func, operator, args, kwargs) if self.is_paused else func(*args, **kwargs)
        if (operator.writes or operator.statistics) and self._kept_calls.calls:
            self._before_write(operator, args, kwargs)
        before = self._states(args, kwargs) if operator.is_random else []
        # Compiled code takes its inputs out of the list it is given.
        inputs = None if isinstance(func, OpOverload) else metas_of(args, kwargs)
        call = self._counter.next((func, torch.is_grad_enabled()))  # counted here, like a call that raises
        if self.is_on_wrappers:
            self.saw_wrappers = True
            given, operator = _run_and_listen(func, operator, args, kwargs)
        else:
            given = func(*args, **kwargs)
        result = _at(operator.writes, args, kwargs) if operator.fills else given
        if self._storages is not None and not (operator.is_view or operator.writes):
            self._storages.update((id(storage), ref(storage)) for storage in storages_in(result))
        answer = self._decide(func, operator, call, args, kwargs, result)
        can_be_kept = operator.can_be_kept and not (self._is_exact and operator.hides_writes)
        if can_be_kept and (answer.is_kept or self._makers is not None):
            made = _Made((func, torch.is_grad_enabled(), call), operator, answer, inputs or metas_of(args, kwargs))
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
        written = [tensor for tensor in _at(operator.writes, args, kwargs) if id(tensor) not in self._own]
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
        kept.place, kept.inputs, kept.states = made.answer.place, made.inputs, made.states
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

    def keep_maker(self, value: Tensor) -> Answer | None:
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
        storages = storages_in(_at((*operator.writes, *operator.statistics), args, kwargs))
        for call in self._kept_calls.calls.values():
            if call.shares_memory(storages):
                self._meet_write(call, operator)

    def _meet_write(self, kept: KeptCall, operator: Operator) -> None:
        """An operator is about to write into a kept value."""
        kept.copy_out()
        kept.is_written = True
        if isinstance(kept.line, DecisionLine):
            kept.line.is_written = True  # from the next call on, a copy is kept at once


class ChoiceMode(DispatchMode):
    """Gives recomputation the choices of forward, where nothing else was kept: a topk may come out otherwise.

    Args:
        choices: the results of forward's calls that choose, in order.
    """

    def __init__(self, choices: list[list[Tensor]]) -> None:
        super().__init__()
        self._choices, self._next, self._run = choices, 0, current_run()
        self.is_paused = False

    def __enter__(self) -> Self:
        """A recomputation starts: from the first."""
        self._next, self._run = 0, current_run()
        return super().__enter__()

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the next choice if this is one, and gives as many tensors; else run it, as any that draws."""
        operator = operator_of(func)
        if self.is_paused or current_run() is not self._run:
            return func(*args, **kwargs)
        if operator.is_routing and self._next < len(self._choices):
            chosen = [tensor.detach() for tensor in self._choices[self._next]]
            self._next += 1
            if len(chosen) == count_results(func) and not operator.is_random:
                return chosen[0] if len(chosen) == 1 else tuple(chosen)
        return func(*args, **kwargs)


class ServingMode(_OperatorMode):
    """Gives recomputation what forward kept, in place of running it."""

    def __init__(
        self,
        kept_calls: KeptCalls,
        *,
        refuse: Callable[[KeptCall], None] | None = None,
        ops: frozenset[Any] | None = None,
    ) -> None:
        super().__init__(kept_calls, ops)
        self._refuse = refuse
        self.served = 0
        self.count_made: Callable[[], int] | None = None  # how many tensors the recomputation has saved so far

    def __enter__(self) -> Self:
        """A recomputation starts: count from the beginning."""
        self._counter = Counter()
        self.served = 0
        self._run = current_run()
        self._kept_calls.unpack()
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._kept_calls.let_go()

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what was kept of this call, or run it."""
        operator = operator_of(func)
        if operator.is_ignored or self._looks_away(func, operator, args, kwargs):
            return func(*args, **kwargs)
        is_tracked = torch.is_grad_enabled()
        call = self._counter.next((func, is_tracked))
        kept = self._kept_calls.take((func, is_tracked, call))
        if kept is None:
            return func(*args, **kwargs)
        self.served += is_tracked or kept.talks
        if self.count_made is not None and is_tracked and kept.position != self.count_made():
            self._slip(kept)
        given = tensors_in(args, kwargs)
        if kept.inputs != metas_of(args, kwargs):
            self._mismatch(kept, call, given)
        if kept.is_changed or kept.must_rerun:
            if self._refuse is not None:
                self._refuse(kept)
            return func(*args, **kwargs)
        result = kept.serve(is_last=is_last_recomputation())
        if kept.fills:
            for place, value in zip(_at(operator.writes, args, kwargs), result, strict=True):
                place.copy_(value)
            return answer(func, _given(operator, args, kwargs))
        if not operator.writes:
            return result
        ((position, name),) = operator.writes
        target: Tensor = args[position] if position < len(args) else kwargs[name]
        return target.copy_(result)

    def _slip(self, kept: KeptCall) -> NoReturn:
        assert self.count_made is not None
        message = (
            f"region '{self._kept_calls.region}': {kept.label} was kept after {kept.position} saved tensors in "
            f"forward, and is met after {self.count_made()} in recomputation."
        )
        raise Slipped(message)

    def check(self, index: int) -> None:
        """Saved tensor `index` is made again."""
        self._kept_calls.tally.check(self._kept_calls.region, index, self.served)

    def _mismatch(self, kept: KeptCall, call: int, given: list[Tensor]) -> None:
        was = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in kept.inputs or ())
        now = ", ".join(describe_tensor(tensor) for tensor in given)
        place = kept.place or Places(self._kept_calls.region).find(2)
        message = (
            f"region '{self._kept_calls.region}': call {call} of {kept.label}{place}, which was kept, ran on {was} in "
            f"forward and on {now} in recomputation.\n"
            "The function took a different path than in forward: it read something that changed in between.\n"
            "To see both operator logs side by side, wrap the step in `recollect.explain_mismatch()`."
        )
        raise MismatchError(message)
