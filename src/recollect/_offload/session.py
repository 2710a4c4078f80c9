"""A session: a pair of saved-tensor hooks that send values away and have them back, and learn when from each step.

Anybody can use the pair: `with session:` puts it in force as saved-tensor hooks; a region packs its inputs through it,
and a policy what it keeps.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from recollect._core.offload_news import listeners
from recollect._core.operators import is_wrapper
from recollect._core.scope import current_run
from recollect._core.torch_private.ambient import function_mode_depth, without_function_modes
from recollect._core.torch_private.dispatch import dispatch_mode_depth, without_dispatch_modes
from recollect._core.torch_private.engine import next_sequence, pop_hooks, push_hooks
from recollect._core.torch_private.graph import is_parameter
from recollect._core.torch_private.streams import is_capturing
from recollect._core.units import format_bytes
from recollect._offload.accounts import Accounts, OffloadReport
from recollect._offload.departures import Departures
from recollect._offload.kinds import Kind, Kinds
from recollect._offload.learning import MEASURED_STEPS, Learner, SessionOptions
from recollect._offload.parcels import Parcel, ParcelView, Stayed
from recollect._offload.returns import Returns
from recollect._offload.steps import SeenStep
from recollect._offload.streams import StreamClock
from recollect._offload.transfers import Transfers

_log = logging.getLogger("recollect")

_LOG_AFTER = 3
_SLOW_STEPS = 2  # in a row, before a word is said: one alone may have waited for something else
_FORGOTTEN = 256  # entries of values that are gone, before they are swept out


class Session:
    """Sends what is packed away, and brings what is unpacked back.

    Forward and backward may run on different threads. One session serves one model on one thread at a time; several
    share tiers safely.

    Both hooks run once for each saved tensor of each step. `benchmarks/offload.py --case host` says what they cost.

    Attributes:
        tier: in words, where values go.
        options: how it behaves.
        transfers: what does the copying.

    Quiet ones say nothing of what they did, or of steps that wait.
    """

    def __init__(self, tier: str, options: SessionOptions, transfers: Transfers, *, is_quiet: bool = False) -> None:
        self.tier, self.options, self.transfers = tier, options, transfers
        self._min_bytes = options.min_bytes
        self._lock = threading.RLock()
        self._acquire, self._release = self._lock.acquire, self._lock.release  # half the cost of `with`, 0.15 µs
        self._step: SeenStep | None = None
        self._known: dict[int, ref[Parcel]] = {}  # by id of the storage
        self._kinds = Kinds(options.compression)
        self._departures = Departures(options, transfers)
        self._returns = Returns(options, transfers, self._end_pass)
        self._learner = Learner(tier, options, transfers)
        self._unclosed: deque[SeenStep] = deque(maxlen=MEASURED_STEPS)  # whose times cannot be read yet
        self._notices = transfers.notices
        self._has_logged = self._has_warned = is_quiet

    # The hooks.

    def __enter__(self) -> Self:
        """Put the hooks in force."""
        push_hooks(self.pack, self.unpack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pop_hooks()
        self.settle()

    def settle(self) -> None:
        """Begin the way out of all that was packed: the operators that saved it have run."""
        with self._lock, unseen():
            self._departures.settle()
        self._tell()

    def pass_by(self) -> None:
        """Forward has come further without saving anything here: what has left by now may be let go."""
        step = self._step
        if step is None or step.has_backward or current_run() is not None:
            return
        self._acquire()
        try:
            with unseen() if function_mode_depth() or dispatch_mode_depth() else nullcontext():
                self._departures.pass_by(step)
        finally:
            self._release()

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that backward will need; gives what stands for it."""
        if type(tensor) is not Tensor:
            return self._pack_wrapper(tensor) if is_wrapper(tensor) else Stayed(tensor)
        is_leaf, base = tensor.is_leaf, tensor._base  # noqa: SLF001
        if (is_leaf or base is not None) and _is_there_anyway(tensor, base):
            return Stayed(tensor)
        if current_run() is not None or (tensor.is_cuda and is_capturing()):
            return Stayed(tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it is sparse, or a transform tracks it
            return Stayed(tensor)
        self._acquire()
        try:
            if function_mode_depth() or dispatch_mode_depth():
                with unseen():
                    packed = self._take_in(tensor, storage, is_leaf)
            else:
                packed = self._take_in(tensor, storage, is_leaf)
        finally:
            self._release()
        if self._notices.waiting:
            self._notices.give()
        return packed

    def unpack(self, handle: Any) -> Tensor:
        """Give back the tensor that something stands for.

        Raises:
            OffloadError: the tier has not got it any more as it was.
            ChangedInputError: it was changed in place before it had left.
        """
        parcel: Parcel
        if type(handle) is Parcel:
            parcel = handle
        elif type(handle) is ParcelView:
            parcel = handle.parcel
        elif type(handle) is Stayed:
            return handle.get()
        else:
            wrapped: _Wrapped = handle
            return wrapped.rebuild([self.unpack(part) for part in wrapped.parts])
        self._acquire()
        try:
            if function_mode_depth() or dispatch_mode_depth():
                with unseen():
                    tensor = self._give(parcel, handle.kind)
            else:
                tensor = self._give(parcel, handle.kind)
        finally:
            self._release()
        if self._notices.waiting:
            self._notices.give()
        return tensor

    def _pack_wrapper(self, tensor: Tensor) -> Any:
        """A distributed tensor travels as what it wraps; one that is still on its way from other processes stays."""
        kind: Any = type(tensor)
        is_leaf = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        if is_leaf or is_parameter(tensor) or hasattr(tensor, "trigger_wait"):
            return Stayed(tensor)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]
        if not all(isinstance(part, Tensor) for part in parts):
            return Stayed(tensor)
        sizes, strides = tensor.shape, tensor.stride()

        def rebuild(values: list[Tensor]) -> Tensor:
            inner = dict(zip(names, values, strict=True))
            whole: Tensor = kind.__tensor_unflatten__(inner, context, sizes, strides)
            return whole

        return _Wrapped([self.pack(part) for part in parts], rebuild)

    # Forward.

    def _take_in(self, tensor: Tensor, storage: torch.UntypedStorage, is_constant: bool) -> Any:  # noqa: FBT001
        departures = self._departures
        sequence = next_sequence() if is_constant else None
        if departures.is_due or departures.waiting:
            departures.flush(sequence)
        known = self._known.get(id(storage))
        parcel = None if known is None else known()
        if parcel is not None and parcel.storage() is not storage:
            parcel = None  # of memory that is gone
        step = self._step
        if parcel is None and step is not None and not step.has_backward:
            number = len(step.parcels)
            if number < len(step.foreseen) and step.foreseen[number].fits(tensor, storage, is_constant):
                return self._send_off(tensor, storage, step.foreseen[number], step, sequence)
        return self._take_in_unforeseen(tensor, storage, parcel, sequence)

    def _take_in_unforeseen(
        self, tensor: Tensor, storage: torch.UntypedStorage, parcel: Parcel | None, sequence: int | None
    ) -> Any:
        """A tensor that is not the next one of the step as it was foreseen; `parcel` has its storage, if one has."""
        try:
            is_small = storage.nbytes() < self._min_bytes or tensor.numel() == 0
        except (NotImplementedError, RuntimeError):  # a transform tracks it
            return Stayed(tensor)
        if is_small or tensor.is_conj() or tensor.is_neg():
            return Stayed(tensor)
        kind = self._kinds.find(tensor, storage)
        if parcel is not None and parcel.serves(tensor, kind):
            return ParcelView(kind, parcel)
        step = self._step
        if step is None or step.has_backward:
            step = self._open_step()
        number, foreseen = len(step.parcels), step.foreseen
        if number >= len(foreseen) or foreseen[number] is not kind:
            if kind.size < self._min_bytes or not self.transfers.can_carry(kind):
                return Stayed(tensor)
            if number == 0 or foreseen:
                step.follow(self._learner.lessons.find([*step.kinds, kind]))
        return self._send_off(tensor, storage, kind, step, sequence)

    def _send_off(
        self, tensor: Tensor, storage: torch.UntypedStorage, kind: Kind, step: SeenStep, sequence: int | None
    ) -> Parcel:
        """A value that nobody has saved before, as the next of a step."""
        parcel = Parcel(tensor, ref(storage), kind, step, len(step.parcels))
        if sequence is not None:
            parcel.is_constant = True
        one = self._known[id(storage)] = ref(parcel)
        step.parcels.append(one)
        step.kinds.append(kind)
        if step.accounts.measures:
            step.note_made(parcel, self._clock_of(parcel))
        self._departures.begin(step, parcel, sequence)
        return parcel

    def _open_step(self) -> SeenStep:
        if self._step is not None:
            self._unclosed.append(self._step)
        is_learning = self._learner.is_learning
        self._unclosed = deque(
            (step for step in self._unclosed if not self._learner.close(step, waits=is_learning)), maxlen=MEASURED_STEPS
        )
        # While a profile is taken, which slows the step down, nothing is to be learnt of it.
        is_measured = not listeners.present and self._learner.count()
        self.transfers.accounts = Accounts(measures=is_measured)
        if self._step is not None and len(self._known) > 2 * len(self._step.parcels) + _FORGOTTEN:
            self._known = {key: known for key, known in self._known.items() if known() is not None}
        self._step = SeenStep(self.transfers)
        return self._step

    # Backward.

    def _give(self, parcel: Parcel, kind: Kind) -> Tensor:
        departures, returns, step = self._departures, self._returns, parcel.step
        if departures.pending or departures.waiting:
            departures.finish()
        returns.note_asked(parcel)
        if not parcel.is_used:
            parcel.is_used = True
            if step.accounts.measures or not step.has_backward:
                self._note_used(parcel)
        if step.leaving:
            departures.release_done(step)
        returns.fetch_with(parcel)
        here, start = self.transfers.take(parcel)
        if kind is not parcel.kind or not kind.is_dense:
            tensor = kind.on(here.untyped_storage(), start)
        elif parcel.asked == 1 and here is parcel.returned and parcel.lanes is not None:
            tensor = here  # it came for nobody else
        else:
            tensor = here.data  # with a version of its own, as if it were made anew
        returns.note_given(parcel)
        return tensor

    def _note_used(self, parcel: Parcel) -> None:
        """A value is asked for, for the first time."""
        step = parcel.step
        if not step.has_backward:
            step.has_backward = True
            self._begin_backward(step)
        if step.accounts.measures:
            if parcel.alias is None and parcel.storage() is not None:
                step.held.add(parcel.number)
            stream = None if parcel.lanes is None else parcel.lanes.current()
            step.note_used(parcel.number, self._clock_of(parcel), stream)

    def _begin_backward(self, step: SeenStep) -> None:
        self._departures.release_late(step)
        if step.sends is None or len(step.parcels) != len(step.sends):
            step.follow(None)
            step.due.extend(reversed(range(len(step.parcels))))
        else:
            step.due.extend(step.fetches.get(-1, ()))

    def _end_pass(self) -> None:
        """A backward pass is done: hold nothing that it had, and learn from the step."""
        with self._lock:
            self._returns.drop()
            step = self._step
            if step is not None and step.is_done() and self._learner.is_learning:
                self._learner.close(step, waits=True)
        self._tell()

    def _clock_of(self, parcel: Parcel) -> StreamClock:
        return self.transfers.host_clock if parcel.lanes is None else parcel.lanes.clock

    # Words.

    def report(self) -> OffloadReport:
        """What offloading does in a step, as last measured."""
        with self._lock:
            step = self._step
            if step is not None and step.has_backward and step.is_done():
                self._learner.close(step, waits=True)
            return self._learner.report

    def _tell(self) -> None:
        """Say what is to be said: outside the lock, where a warning may raise."""
        self._notices.give()
        learner, report = self._learner, self._learner.report
        if learner.steps <= _LOG_AFTER or report.stall_s is None:
            return
        if not self._has_logged:
            self._has_logged = True
            _log.info("%s", report)
        if not self._has_warned and learner.slow_steps >= _SLOW_STEPS:
            self._has_warned = True
            assert report.forward_s is not None
            message = (
                f"offloading to {self.tier} makes each step wait {report.stall_s * 1e3:.1f} ms for copies "
                f"({format_bytes(report.out_bytes)} out, {format_bytes(report.back_bytes)} back); running forward "
                f"again would take about {report.forward_s * 1e3:.1f} ms.\n"
                "The link is too slow for that much. Offload only what can be copied without waiting (`wait=False`), "
                "or recompute: recollect.apply(model)."
            )
            warnings.warn(message, UserWarning, stacklevel=3)


def unseen() -> AbstractContextManager[object]:
    """A context in which no mode of anybody sees our copies. Nearly always there is none: ask before."""
    stack = ExitStack()
    stack.enter_context(without_function_modes())
    stack.enter_context(without_dispatch_modes())
    return stack


def _is_there_anyway(tensor: Tensor, base: Tensor | None) -> bool:
    """Whether a tensor or what it is a view of is a leaf or a parameter, or cannot be held apart from its history."""
    is_leaf = tensor.is_leaf and (tensor.requires_grad or tensor.is_inference())
    return is_leaf or (base is not None and base.is_leaf and base.requires_grad) or is_parameter(tensor)


class _Wrapped:
    """Stands for a tensor that wraps others."""

    __slots__ = ("parts", "rebuild")

    def __init__(self, parts: list[Any], rebuild: Callable[[list[Tensor]], Tensor]) -> None:
        self.parts, self.rebuild = parts, rebuild
