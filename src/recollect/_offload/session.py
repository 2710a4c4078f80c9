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

from recollect._core.operators import is_wrapper
from recollect._core.scope import is_recomputing
from recollect._core.torch_private.ambient import function_mode_depth, without_function_modes
from recollect._core.torch_private.dispatch import dispatch_mode_depth, without_dispatch_modes
from recollect._core.torch_private.engine import current_pass, next_sequence, pop_hooks, push_hooks, when_pass_ends
from recollect._core.torch_private.graph import is_parameter
from recollect._core.torch_private.storages import count_holders
from recollect._core.travel import listeners
from recollect._core.units import format_bytes
from recollect._offload.accounts import Accounts, OffloadReport
from recollect._offload.learning import MEASURED_STEPS, Learner, SessionOptions
from recollect._offload.parcels import Handle, Parcel, Stayed, stretch_of
from recollect._offload.steps import Step
from recollect._offload.streams import Clock, is_capturing
from recollect._offload.transfers import Transfers

_log = logging.getLogger("recollect")

_LOG_AFTER = 3
_ALONE = 1  # holders of a storage when only our alias is left


class Session:
    """Sends what is packed away, and brings what is unpacked back.

    Forward and backward may run on different threads. One session serves one model on one thread at a time; several
    share tiers safely.

    Attributes:
        tier: in words, where values go.
        options: how it behaves.
        transfers: what does the copying.
    """

    def __init__(self, tier: str, options: SessionOptions, transfers: Transfers) -> None:
        self.tier, self.options, self.transfers = tier, options, transfers
        self._lock = threading.RLock()
        self._step: Step | None = None
        self._known: dict[int, ref[Parcel]] = {}  # by id of the storage
        # Weakly, all of them: only graphs hold parcels.
        self._pending: deque[tuple[ref[Parcel], int]] = deque()
        self._waiting: list[ref[Parcel]] = []  # to be sent once nobody else holds them
        self._unclosed: deque[Step] = deque(maxlen=MEASURED_STEPS)  # whose times cannot be read yet
        self._learner = Learner(tier, options, transfers)
        self._pass_id = -1
        self._came_back: list[ref[Parcel]] = []
        self._has_spoken = False

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
            self._flush(None)
        self._tell()

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that backward will need; gives what stands for it.

        The copy does not begin before the operator that saved it has run: some write into what they have saved.
        """
        if not self._travels(tensor):
            return self._pack_wrapper(tensor) if is_wrapper(tensor) else Stayed(tensor)
        with self._lock, unseen():
            storage = tensor.untyped_storage()
            version = tensor._version  # noqa: SLF001
            sequence = next_sequence()
            self._flush(sequence)
            known = self._known.get(id(storage))
            parcel = None if known is None else known()
            if parcel is None or not parcel.serves(tensor, storage, version):
                parcel = Parcel(tensor, storage, version, self.transfers)
                self._known[id(storage)] = ref(parcel)
                self._begin(parcel, tensor, sequence)
            handle = Handle(tensor, parcel)
        self._tell()
        return handle

    def unpack(self, handle: Any) -> Tensor:
        """Give back the tensor that something stands for.

        Raises:
            OffloadError: the tier has not got it any more as it was.
            ChangedInputError: it was changed in place before it had left.
        """
        if type(handle) is Stayed:
            return handle.get()
        if type(handle) is _Wrapped:
            return handle.rebuild([self.unpack(part) for part in handle.parts])
        parcel: Parcel = handle.parcel
        with self._lock, unseen():
            self._flush(None)
            self._stop_waiting()
            running = current_pass()
            self._enter_pass(parcel, running)
            self.transfers.fetch(parcel)
            self._fetch_ahead(parcel.step, parcel.number)
            storage, start = self.transfers.take(parcel)
            parcel.step.flying.pop(parcel.number, None)
            parcel.asked -= 1
            tensor: Tensor = handle.on(storage, start, parcel.device)
            if parcel.asked <= 0 or running == -1:
                parcel.asked = 0
                self.transfers.drop_returned(parcel)
        self._tell()
        return tensor

    def _travels(self, tensor: Tensor) -> bool:
        """Whether a tensor may be sent: no parameter or leaf, on plain memory, large enough."""
        if type(tensor) is not Tensor or _is_leaf(tensor) or is_parameter(tensor):
            return False
        if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return False
        try:
            storage = tensor.untyped_storage()
            size = storage.nbytes() and stretch_of(tensor, storage)[1]
        except (NotImplementedError, RuntimeError):  # no memory of its own: a transform tracks it
            return False
        if size < self.options.min_bytes or tensor.numel() == 0 or tensor.device.type == "meta":
            return False
        if is_recomputing() or is_capturing(tensor.device):
            return False
        return self.transfers.has_lanes(tensor.device)

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

    def _begin(self, parcel: Parcel, tensor: Tensor, sequence: int) -> None:
        """A new value: give it its number, and see what is to become of it."""
        step = self._step
        if step is None or step.has_backward:
            step = self._open_step()
        if not parcel.is_on_host:
            parcel.stream = parcel.lanes.current()
        parcel.codec = self.options.compression.codec_for(parcel.dtype, parcel.size)
        if parcel.codec is not None:
            parcel.travel_bytes = parcel.codec.encoded_bytes(parcel.size)
        parcel.step, parcel.number = step, len(step.parcels)
        step.parcels.append(ref(parcel))
        step.signatures.append((parcel.size, tensor.shape, tensor.dtype, tensor.device))
        if step.accounts.measures:
            step.note_made(parcel, self._clock_of(parcel))
        self._foresee(step)
        if self._sends(step, parcel):
            self._pending.append((ref(parcel), sequence))
        else:
            parcel.stays = True
            self.transfers.accounts.stayed_bytes += parcel.size
        self._let_go(step, parcel.number)

    def _foresee(self, step: Step) -> None:
        """See by which lesson the step goes on: the one it began with, another that begins so, or none."""
        number = len(step.parcels) - 1
        lesson = step.lesson
        is_as_foreseen = lesson is None or (
            number < len(lesson.signatures) and lesson.signatures[number] == step.signatures[number]
        )
        if number == 0 or not is_as_foreseen:
            step.lesson = self._learner.lessons.find(step.signatures)

    def _sends(self, step: Step, parcel: Parcel) -> bool:
        table = step.timetable
        if table is not None:
            return table.sends[parcel.number]
        if self.options.waits:
            return True
        self._release_done(step)
        return self.transfers.leaving_bytes + parcel.size <= self.options.in_flight

    def _flush(self, sequence: int | None) -> None:
        """Send what waits, except what the operator of that sequence number is saving just now."""
        while self._pending and self._pending[0][1] != sequence:
            parcel = self._pending.popleft()[0]()
            if parcel is None:
                continue
            if parcel.step.timetable is None and self._may_be_held(parcel):
                self._waiting.append(ref(parcel))
            else:
                self._send(parcel)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                parcel = one()
                if parcel is not None and self._may_be_held(parcel):
                    self._waiting.append(one)
                elif parcel is not None:
                    self._send(parcel)

    def _stop_waiting(self) -> None:
        """Forward is over: what somebody still holds is a buffer, an input, or the like, and stays."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            parcel = one()
            if parcel is not None:
                parcel.stays = True
                parcel.step.held.add(parcel.number)
                self.transfers.accounts.stayed_bytes += parcel.size

    @staticmethod
    def _may_be_held(parcel: Parcel) -> bool:
        """Whether somebody else holds a value without history, as modules hold buffers, and callers their inputs."""
        alias = parcel.alias
        return parcel.is_constant and alias is not None and count_holders(alias.untyped_storage()) > _ALONE

    def _send(self, parcel: Parcel) -> None:
        self.transfers.send(parcel)
        if parcel.is_leaving:
            parcel.step.leaving.append(ref(parcel))
            if self.options.waits:
                self._keep_in_flight(parcel.step)
        elif parcel.stays:
            self.transfers.accounts.stayed_bytes += parcel.size

    def _keep_in_flight(self, step: Step) -> None:
        """Wait for the oldest copies while too many are on their way."""
        while self.transfers.leaving_bytes > self.options.in_flight and len(step.leaving) > 1:
            oldest = step.leaving.popleft()()
            if oldest is not None:
                self.transfers.note_written(oldest)
                self.transfers.release(oldest)

    def _release_done(self, step: Step) -> None:
        """Let go of what has left meanwhile, without waiting."""
        while step.leaving:
            oldest = step.leaving[0]()
            if oldest is not None and oldest.is_leaving:
                self.transfers.note_written(oldest)
                if oldest.is_leaving and not self._has_left(oldest):
                    return
                self.transfers.release(oldest)
            step.leaving.popleft()

    def _has_left(self, parcel: Parcel) -> bool:
        if parcel.is_on_host:
            return parcel.written is None or parcel.written.future.done()
        clock = self._clock_of(parcel)
        return clock.is_past(parcel.out)

    def _let_go(self, step: Step, number: int) -> None:
        """Let go of the memory of what will have left by now, as the timetable has it."""
        table = step.timetable
        due = step.late + (table.releases.get(number, []) if table is not None else [])
        step.late = []
        for one in due:
            parcel = step.parcels[one]() if one < len(step.parcels) else None
            if parcel is None or parcel.stays:
                continue
            if parcel.is_leaving:
                self.transfers.release(parcel)
            elif parcel.alias is not None:
                step.late.append(one)

    # Backward.

    def _enter_pass(self, parcel: Parcel, running: int) -> None:
        step: Step = parcel.step
        if running not in (-1, self._pass_id):
            self._drop_returned()  # of a pass that failed, which does not say so
            self._pass_id = running
            when_pass_ends(self._end_pass)
        if parcel.pass_id != running:
            parcel.pass_id, parcel.asked = running, parcel.users
            self._came_back.append(ref(parcel))
        if parcel.number not in step.used:
            if parcel.alias is None and parcel.storage() is not None:
                step.held.add(parcel.number)
            if not step.has_backward:
                self._begin_backward(step)
            step.used.add(parcel.number)
            if step.accounts.measures:
                stream = None if parcel.is_on_host else parcel.lanes.current()
                step.note_used(parcel.number, self._clock_of(parcel), stream)
        self._release_done(step)

    def _begin_backward(self, step: Step) -> None:
        for one in step.late:
            parcel = step.parcels[one]()
            if parcel is not None:
                self.transfers.release(parcel)
        step.late = []
        table = step.timetable
        if table is None or len(step.parcels) != len(table.sends):
            step.lesson = None
            step.due.extend(reversed(range(len(step.parcels))))
        else:
            step.due.extend(table.fetches.get(-1, ()))

    def _fetch_ahead(self, step: Step, number: int) -> None:
        """Begin the way back of what will be asked for next."""
        table = step.timetable
        if table is not None:
            step.due.extend(table.fetches.get(number, ()))
        if self.transfers.slow is not None:
            for one in list(step.flying):
                parcel = step.parcels[one]()
                if parcel is not None and parcel.reading is not None and parcel.reading.future.done():
                    self.transfers.fetch(parcel)
        if not step.due:
            return
        flying = sum(step.flying.values())
        while step.due:
            one = step.due[0]
            parcel = step.parcels[one]()
            if parcel is not None and one not in step.used and parcel.alias is None and parcel.returned is None:
                is_foreseen = table is not None and not self.options.waits  # late in backward there is room enough
                if flying and flying + parcel.size > self.options.in_flight and not is_foreseen:
                    return
                self.transfers.fetch(parcel)
                self._came_back.append(ref(parcel))
                step.flying[one] = parcel.size
                parcel.asked = max(parcel.asked, 1)
                flying += parcel.size
            step.due.popleft()

    def _drop_returned(self) -> None:
        came, self._came_back = self._came_back, []
        for one in came:
            parcel = one()
            if parcel is not None:
                self.transfers.drop_returned(parcel)
                parcel.step.flying.pop(parcel.number, None)
                parcel.asked = 0

    def _end_pass(self) -> None:
        """A backward pass is done: hold nothing that it had, and learn from the step."""
        with self._lock:
            self._pass_id = -1
            self._drop_returned()
            step = self._step
            if step is not None and step.is_done() and self._learner.is_learning:
                self._learner.close(step, waits=True)
        self._tell()

    # Learning.

    def _clock_of(self, parcel: Parcel) -> Clock:
        clock: Clock = self.transfers.host_clock if parcel.is_on_host else parcel.lanes.clock
        return clock

    def _open_step(self) -> Step:
        if self._step is not None:
            self._unclosed.append(self._step)
        is_learning = self._learner.is_learning
        self._unclosed = deque(
            (step for step in self._unclosed if not self._learner.close(step, waits=is_learning)), maxlen=MEASURED_STEPS
        )
        # While a profile is taken, which slows the step down, nothing is to be learnt of it.
        is_measured = not listeners and self._learner.count()
        self.transfers.accounts = Accounts(measures=is_measured)
        self._known = {key: known for key, known in self._known.items() if known() is not None}
        self._step = Step(self.transfers.accounts)
        return self._step

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
        self.transfers.say_news()
        if self._has_spoken or self._learner.steps <= _LOG_AFTER or self._learner.report.stall_s is None:
            return
        self._has_spoken = True
        report = self._learner.report
        _log.info("%s", report)
        if report.is_slower_than_recomputing:
            assert report.stall_s is not None
            assert report.forward_s is not None
            message = (
                f"offloading to {self.tier} makes each step wait {report.stall_s * 1e3:.1f} ms for copies "
                f"({format_bytes(report.out_bytes)} out, {format_bytes(report.back_bytes)} back); running forward "
                f"again would take about {report.forward_s * 1e3:.1f} ms.\n"
                "The link is too slow for so much. Send only what travels unseen (`wait=False`), or recompute: "
                "recollect.apply(model)."
            )
            warnings.warn(message, UserWarning, stacklevel=3)


_seen = nullcontext()


def unseen() -> AbstractContextManager[object]:
    """A context in which no mode of anybody sees our copies. Nearly always there is none, and it does nothing."""
    if not function_mode_depth() and not dispatch_mode_depth():
        return _seen
    stack = ExitStack()
    stack.enter_context(without_function_modes())
    stack.enter_context(without_dispatch_modes())
    return stack


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor or what it is a view of collects gradients itself; it is then there anyway."""
    base = tensor._base  # noqa: SLF001
    return (tensor.is_leaf and tensor.requires_grad) or (base is not None and base.is_leaf and base.requires_grad)


class _Wrapped:
    """Stands for a tensor that wraps others."""

    __slots__ = ("parts", "rebuild")

    def __init__(self, parts: list[Any], rebuild: Callable[[list[Tensor]], Tensor]) -> None:
        self.parts, self.rebuild = parts, rebuild
