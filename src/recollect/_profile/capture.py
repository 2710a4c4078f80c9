"""Watches a step: a dispatch mode that writes down every operator, its memory, its place, and what autograd keeps.

It holds no tensor alive and copies none, so that the step lives as it would alone. What a graph holds for backward is
read off the graph when its backward begins; a forward whose backward never runs shows nothing saved. The raw calls
become a Profile in `assemble`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recollect._core.offload_news import News, listeners
from recollect._core.operators import Operator, count_flops, operator_of
from recollect._core.scope import current_run, watcher
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.engine import (
    current_node,
    current_pass,
    engine_calls,
    next_sequence,
    when_pass_ends,
)
from recollect._core.torch_private.graph import leaf_of
from recollect._profile.above import Above
from recollect._profile.allocations import AllocationMeter
from recollect._profile.graphs import Graphs, Unfold
from recollect._profile.raw import IS_SHADOW, RawCall, RawValue
from recollect._profile.received import Receptions
from recollect._profile.snapshot import Snapshot, tensors_of_optimizer
from recollect._profile.storage_log import StorageLog
from recollect._profile.storages import storages_of, tensors_written
from recollect._profile.timing import NoTimer, Timer
from recollect._profile.travels import Travels
from recollect._profile.variables import Variables
from recollect._profile.whereabouts import Whereabouts

_LIFT = "aten.lift_fresh.default"
_PROGRESS_EVERY = 256
_PLAIN = frozenset({Tensor, nn.Parameter})
_NONE: tuple[Tensor, ...] = ()

Workspace = Callable[[Operator, tuple[Any, ...], dict[str, Any], Any], int]
"""Bytes that an operator takes and gives back while it runs, from its arguments and result."""


class Capture(DispatchMode):
    """Writes down a step while entered.

    Args:
        timer: times the operators.
        snapshot: is told of what is about to be changed; None where nothing real can be.
        unfold: see `Unfold`.
        region_of: see `Whereabouts`.
        replay_of: see `Whereabouts`.
        workspace: see `Workspace`.
        meter: measures what operators take on the device; where it does not, `workspace` counts.
        progress: called now and then with the number of calls so far.

    Attributes:
        calls: in the order in which they ran.
        graphs: what they held.
        storages: of everything.
        gradients: numbers of storages that were the gradient of a leaf.
        states: numbers of storages that were an optimizer's state.
        optimizers: that made a step.
        travels: copies to other tiers and back.
        receptions: what modules were called with.
        whereabouts: where in the step and in the user's code calls stand.
    """

    looks_beneath = True

    def __init__(
        self,
        *,
        timer: Timer,
        snapshot: Snapshot | None,
        unfold: Unfold,
        region_of: Callable[[], str],
        replay_of: Callable[[], tuple[str, str] | None],
        workspace: Workspace | None = None,
        meter: AllocationMeter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self.calls: list[RawCall] = []
        self.graphs = Graphs(unfold)
        self.storages = StorageLog()
        self.gradients: set[int] = set()
        self.states: set[int] = set()
        self.travels = Travels(self.storages)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.whereabouts = Whereabouts(region_of=region_of, replay_of=replay_of)
        self.timer, self._snapshot = timer, snapshot
        self._progress = progress
        self._workspace, self._meter = workspace, meter
        self._lock = threading.RLock()
        self._counts_meta = False
        self._flops: dict[tuple[Any, ...], int] = {}
        self._passes: dict[int, bool] = {}  # backward passes, and whether they are of a graph that forward made
        self._outer_passes = 0
        self._open: set[int] = set()
        self._leaves: dict[int, ref[Tensor]] = {}
        self._leaving = ExitStack()
        self._variables = self.whereabouts.visits.variables = Variables()
        self.receptions = Receptions(self.storages)

    def include(self, tensor: Tensor) -> list[int]:
        """Count a tensor that is there before the step; gives the numbers of its storages."""
        numbers = self.storages.include(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            self._meet_leaf(tensor)
        return numbers

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # an interrupt at any place leaves nothing behind
            stack.callback(self.timer.settle)
            stack.callback(self._note_gradients)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(watcher.reset, watcher.set(self.whereabouts.scopes))
            stack.enter_context(listeners.listening(self._hear))
            self._variables.start(self._note_variables)
            stack.callback(self._variables.stop)
            self.whereabouts.visits.start(self._note_arguments)
            stack.callback(self.whereabouts.visits.stop)
            super().__enter__()
            stack.push(super().__exit__)
            self._leaving = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving.__exit__(exc_type, exc, traceback)

    # Operators. What runs here runs once per operator, so that it is written out: a profiled step takes some tens of
    # microseconds more for each.

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and write it down."""
        operator = operator_of(func)
        if operator.is_ignored:
            result = func(*args, **kwargs)
            if operator.name == _LIFT:  # `torch.tensor` makes its tensor without an operator, then passes it here
                self._note_birth(result)
            return result
        is_paused = self._variables.pause()
        try:
            node = current_node() if current_pass() != -1 else None
            if node is not None:
                self._note_node(node)
            sequence = next_sequence() - 1
            written = tensors_written(operator, args, kwargs) if operator.writes or operator.statistics else _NONE
            if self._snapshot is not None:
                self._snapshot.memories.look()
                if written or operator.is_random:
                    self._keep_aside(written, kwargs, node)
            measured = None if self._meter is None else self._meter.begin(operator, args, kwargs)
            started = self.timer.start()
            result = func(*args, **kwargs)
            span = self.timer.stop(started)
            taken = None if self._meter is None or measured is None else self._meter.end(measured)
            with self._lock:
                call = RawCall()
                call.operator, call.span, call.nth_pass = operator, span, self._outer_passes - 1
                self._write_down(call, args, kwargs, result, written)
                if taken is not None:
                    call.workspace_bytes = taken
                leaf = self.whereabouts.place(call, sequence, node)
                if leaf is not None:
                    call.leaf = next(iter(self._numbers(leaf)), -1)
                self.calls.append(call)
            if self._progress is not None and len(self.calls) % _PROGRESS_EVERY == 0:
                self._progress(len(self.calls))
            return result
        finally:
            if is_paused:
                self._variables.resume()

    def write(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write down an operator that is not run and would give nothing."""
        with self._lock:
            call = RawCall()
            call.operator, call.span, call.nth_pass = operator, None, 0
            self._write_down(call, args, kwargs, None, tensors_written(operator, args, kwargs))
            self.whereabouts.place(call, -1, None)
            self.calls.append(call)

    def _note_birth(self, result: Any) -> None:
        with self._lock:
            at = len(self.calls)
            self.storages.settle(at)
            for storage, device in storages_of(result):
                self.storages.number(storage, device, at)

    def _note_variables(self, tensors: list[Tensor]) -> None:
        """Code of a module returns that has these in variables; what runs again in backward says nothing."""
        if current_pass() != -1:
            return
        with self._lock:
            at = len(self.calls)
            self.storages.settle(at)
            for tensor in tensors:
                self.storages.note_variable(tensor, at)

    def _note_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called with these; what runs again in backward says nothing."""
        if current_pass() == -1 and self.is_on:
            with self._lock:
                self.storages.settle(len(self.calls))
                self.receptions.note(module, args, kwargs, len(self.calls))

    def _keep_aside(self, written: Sequence[Tensor], kwargs: dict[str, Any], node: Any) -> None:
        """Memory that is about to be written into, and generators that are about to be drawn from.

        Of what autograd writes without Python, only gradients: the rest is DDP's, which counts steps as well. It notes
        in the first step which parameters are used and, with a static graph, looks there in all later ones.
        """
        assert self._snapshot is not None
        for value in kwargs.values():
            if isinstance(value, torch.Generator):
                self._snapshot.note_generator(value)
        with self._lock:
            self.storages.settle(len(self.calls))
            found = [one for tensor in written for one in storages_of(tensor) if self.storages.was_there(one)]
        if found and current_pass() != -1 and engine_calls(3):
            leaf = leaf_of(node)
            own = [] if leaf is None or leaf.grad is None else [storage for storage, _ in storages_of(leaf.grad)]
            found = [one for one in found if any(one[0] is storage for storage in own)]
        self._snapshot.before_write(found, is_before_backward=not self._passes)

    def _write_down(
        self, call: RawCall, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, written: Sequence[Tensor]
    ) -> None:
        """The memory of a call. The caller still holds arguments and result, so that no key below is stale."""
        operator = call.operator
        self.storages.settle(len(self.calls))
        call.inputs = self._values((*args, *kwargs.values()) if kwargs else args, is_given=True)
        call.writes = list(dict.fromkeys(number for tensor in written for number in self._numbers(tensor)))
        call.outputs = self._values((result,), is_given=False)
        call.flops = 0 if operator.flops is None else self._count_flops(operator, args, kwargs, result)
        call.workspace_bytes = 0 if self._workspace is None else self._workspace(operator, args, kwargs, result)

    def _count_flops(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Operations of a call; those of a call with the same shapes are known."""
        key = (operator.name, *(value.shape if isinstance(value, Tensor) else repr(value) for value in args))
        found = self._flops.get(key)
        if found is None:
            found = self._flops[key] = count_flops(operator, args, kwargs, result)
        return found

    def _values(self, values: Iterable[Any], *, is_given: bool) -> list[RawValue]:
        found: list[RawValue] = []
        log, at = self.storages, len(self.calls)
        for part in values:
            if isinstance(part, Tensor):
                if type(part) in _PLAIN and part.layout is torch.strided:
                    if not part.is_meta or self._counts_meta:
                        storage = part.untyped_storage()
                        number = log.find_same(storage)
                        if number is None:
                            number = log.number(storage, part.device, at, is_given=is_given)
                        found.append((number, part.shape, part.dtype))
                else:
                    found.extend(self._wrapped(part, is_given=is_given))
                if is_given:
                    self._meet_given(part)
            elif isinstance(part, (tuple, list)):
                found.extend(self._values(part, is_given=is_given))
            elif isinstance(part, dict):
                found.extend(self._values(part.values(), is_given=is_given))
        return found

    def _wrapped(self, tensor: Tensor, *, is_given: bool) -> Iterator[RawValue]:
        """A tensor that is none of torch's own: of another class, sparse, nested."""
        parts, at = storages_of(tensor), len(self.calls)
        for storage, device in parts:
            number = self.storages.number(storage, device, at, is_given=is_given)
            yield number, tensor.shape if len(parts) == 1 and tensor.layout is torch.strided else None, tensor.dtype

    def _numbers(self, tensor: Tensor) -> list[int]:
        at = len(self.calls)
        counts = tensor.is_meta and self._counts_meta
        parts = [(tensor.untyped_storage(), tensor.device)] if counts else storages_of(tensor)
        return [self.storages.number(storage, device, at, is_given=True) for storage, device in parts]

    # What autograd keeps.

    def _note_node(self, node: Any) -> None:
        """A node runs: read what the graph behind it holds, before the pass lets go of it.

        A pass inside of another one is that of a reentrant recomputation, whose graph nobody has saved.
        """
        running = current_pass()
        if running not in self._passes:
            self._passes[running] = not self._open
            self._outer_passes += not self._open
            self._open.add(running)
            when_pass_ends(lambda: self._end_pass(running))
        if leaf_of(node) is not None or self.graphs.is_known(node) or current_run() is not None:
            return
        if not self._passes[running]:
            return
        with self._lock:
            self.storages.settle(len(self.calls))
            self.graphs.read_behind(node, self._numbers, self._meet_leaf)

    def _end_pass(self, number: int) -> None:
        self._open.discard(number)
        self._note_gradients()

    def _meet_given(self, tensor: Tensor) -> None:
        """An operator is given a tensor, which may have a place in a graph."""
        if self._snapshot is not None and not (tensor.requires_grad and torch.is_grad_enabled()):
            self._snapshot.memories.note_read(tensor)
        if not tensor.requires_grad:
            return
        if tensor.is_leaf:
            self._meet_leaf(tensor)
        elif current_pass() == -1:
            self.graphs.meet(tensor.grad_fn, self._numbers)

    def _meet_leaf(self, leaf: Tensor) -> None:
        """A leaf that gradients may come to; it is not held, it may have been made in the step."""
        known = self._leaves.get(id(leaf))
        if known is None or known() is not leaf:
            self._leaves[id(leaf)] = ref(leaf)
            if self._snapshot is not None:
                self._snapshot.note_leaf(leaf)

    def _note_gradients(self) -> None:
        with self._lock:
            self.storages.settle(len(self.calls))
            for weak in tuple(self._leaves.values()):
                leaf = weak()
                if leaf is not None and leaf.grad is not None:
                    self.gradients.update(self._numbers(leaf.grad))

    def _hear(self, news: News) -> None:
        """A value is sent away, or comes back."""
        with self._lock:
            at = len(self.calls)
            self.storages.settle(at)
            self.travels.hear(news, at)

    # Optimizers.

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_of_step(optimizer):
            return
        self._note_gradients()
        if self._snapshot is not None:
            self._snapshot.note_optimizer(optimizer)
        self.whereabouts.begin_optimizer()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_of_step(optimizer):
            return
        self.whereabouts.end_optimizer()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self.note_states(tensors_of_optimizer(optimizer))

    def _is_of_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step calls an optimizer: torch also tells of those that other threads train with meanwhile."""
        return IS_SHADOW not in vars(optimizer) and self.is_on

    def note_states(self, tensors: Sequence[Tensor]) -> None:
        """These tensors are an optimizer's state."""
        with self._lock:
            self.storages.settle(len(self.calls))
            for tensor in tensors:
                self.states.update(self._numbers(tensor))

    @contextmanager
    def following(self) -> Iterator[DispatchMode]:
        """What is called inside with grad mode off is an optimizer's, on tensors without memory, and is not timed.

        Gives a mode to be entered; this one need not be, or may be switched off.
        """
        timer, self.timer = self.timer, NoTimer()
        snapshot, self._snapshot = self._snapshot, None
        meter, self._meter = self._meter, None
        self._counts_meta = True
        try:
            with self.whereabouts.in_optimizer():
                yield Above(self)
        finally:
            self._counts_meta = False
            self.timer, self._snapshot, self._meter = timer, snapshot, meter
