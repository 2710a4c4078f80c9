"""Departures: which values leave in forward, when their copies begin, and when their memory is let go."""

from __future__ import annotations

from collections import deque
from weakref import ref

from recollect._core.torch_private.storages import count_holders
from recollect._offload.learning import SessionOptions
from recollect._offload.parcels import Parcel
from recollect._offload.steps import Step
from recollect._offload.transfers import Transfers

_ALONE = 1  # holders of a storage when only our alias is left


class Departures:
    """The way out of a session's values. Holds all of them weakly: only graphs hold parcels.

    Attributes:
        pending: values that are sent once the operator of that sequence number has run.
        waiting: values that are sent once nobody else holds them.
    """

    __slots__ = ("_begun", "_in_flight", "_transfers", "_waits", "pending", "waiting")

    def __init__(self, options: SessionOptions, transfers: Transfers) -> None:
        self._in_flight, self._waits, self._transfers = options.in_flight, options.waits, transfers
        self._begun = 0  # copies, when the last value was seen
        self.pending: deque[tuple[ref[Parcel], int]] = deque()
        self.waiting: list[ref[Parcel]] = []

    def begin(self, step: Step, parcel: Parcel, sequence: int | None) -> None:
        """A new value: send it, keep it, or let it wait for the operator of that sequence number to run.

        Operators may write into what they have saved, RReLU into its noise; but not into values with a history, which
        other operators made. Those leave at once (`sequence` is None).
        """
        number = parcel.number
        sends = step.sends
        if sends[number] if sends is not None else self._sends(step, parcel):
            if sequence is None:
                self._send(parcel)
            else:
                self.pending.append((step.parcels[number], sequence))
        else:
            parcel.stays = True
            self._transfers.accounts.stayed_bytes += parcel.kind.size
        due = step.releases.get(number)
        if due is not None or step.late:
            self._let_go(step, due or ())
        self._begun = self._transfers.turn

    def _sends(self, step: Step, parcel: Parcel) -> bool:
        """Whether a value is sent of which nothing is known yet."""
        if self._waits:
            return True
        self.release_done(step)
        return self._transfers.leaving_bytes + parcel.kind.size <= self._in_flight

    def flush(self, sequence: int | None) -> None:
        """Send what waits, except what the operator of that sequence number is saving just now."""
        while self.pending and self.pending[0][1] != sequence:
            one = self.pending.popleft()[0]
            parcel = one()
            if parcel is None:
                continue
            if parcel.step.sends is None and _may_be_held(parcel):
                self.waiting.append(one)
            else:
                self._send(parcel)
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for one in waiting:
                parcel = one()
                if parcel is not None and _may_be_held(parcel):
                    self.waiting.append(one)
                elif parcel is not None:
                    self._send(parcel)

    def finish(self) -> None:
        """Forward is over: what somebody still holds is a buffer, an input, or the like, and stays."""
        self.flush(None)
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            parcel = one()
            if parcel is not None:
                parcel.stays = True
                parcel.step.held.add(parcel.number)
                self._transfers.accounts.stayed_bytes += parcel.kind.size

    def _send(self, parcel: Parcel) -> None:
        self._transfers.send(parcel)
        if parcel.is_leaving:
            step = parcel.step
            step.leaving.append(parcel.number)
            if self._waits and self._transfers.leaving_bytes > self._in_flight:
                self._keep_in_flight(step)
        elif parcel.stays:
            self._transfers.accounts.stayed_bytes += parcel.kind.size

    def _keep_in_flight(self, step: Step) -> None:
        """Wait for the oldest copies while too many are on their way."""
        while self._transfers.leaving_bytes > self._in_flight and len(step.leaving) > 1:
            oldest = step.parcels[step.leaving.popleft()]()
            if oldest is not None:
                self._transfers.note_written(oldest)
                self._transfers.release((oldest,))

    def release_done(self, step: Step) -> None:
        """Let go of what has left meanwhile, without waiting."""
        leaving = step.leaving
        while leaving:
            oldest = step.parcels[leaving[0]]()
            if oldest is not None and oldest.is_leaving:
                self._transfers.note_written(oldest)
                if oldest.is_leaving and not _has_left(oldest):
                    return
                self._transfers.release((oldest,))
            leaving.popleft()

    def release_late(self, step: Step) -> None:
        """Let go of what was to be let go before it had left; what comes after waits for it."""
        if step.late:
            self._transfers.release(step.live(step.late))
            step.late = []

    def _let_go(self, step: Step, numbers: list[int] | tuple[()]) -> None:
        """Let go of the memory of what will have left by now, as the timetable has it.

        A copy that has only just begun is not waited for, but at the next value: it was to begin earlier.
        """
        late, step.late = step.late, []
        leaving = []
        for number in [*late, *numbers]:
            parcel = step.parcels[number]()
            if parcel is None or parcel.stays:
                continue
            if parcel.is_leaving and parcel.turn <= self._begun:
                leaving.append(parcel)
            elif parcel.alias is not None:
                step.late.append(number)
        if leaving:
            self._transfers.release(leaving)


def _may_be_held(parcel: Parcel) -> bool:
    """Whether somebody else holds a value without history, as modules hold buffers, and callers their inputs."""
    alias = parcel.alias
    return parcel.is_constant and alias is not None and count_holders(alias.untyped_storage()) > _ALONE


def _has_left(parcel: Parcel) -> bool:
    if parcel.lanes is None:
        return parcel.written is None or parcel.written.future.done()
    return parcel.lanes.clock.is_past(parcel.out)
