"""Departures: which values leave in forward, when their copies begin, and when their memory is let go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import ref

from recollect._core.timetables import least_together
from recollect._core.torch_private.engine import next_sequence
from recollect._core.torch_private.storages import count_holders
from recollect._offload.learning import SessionOptions
from recollect._offload.parcels import Parcel
from recollect._offload.steps import SeenStep
from recollect._offload.transfers import Transfers

_ALONE = 1  # holders of a storage when only our alias is left


class Departures:
    """The way out of a session's values. Holds all of them weakly: only graphs hold parcels.

    Attributes:
        pending: small values, which are sent together, and values without history, which are sent once the operator of
            that sequence number has run.
        is_due: whether that is worth a copy by now.
        waiting: values that are sent once nobody else holds them.
    """

    __slots__ = (
        "_begun",
        "_in_flight",
        "_pending_bytes",
        "_together",
        "_transfers",
        "_waits",
        "is_due",
        "pending",
        "waiting",
    )

    def __init__(self, options: SessionOptions, transfers: Transfers) -> None:
        self._in_flight, self._waits, self._transfers = options.in_flight, options.waits, transfers
        self._together = least_together(options.in_flight)
        self._begun = 0  # copies, when the last value was seen
        self.pending: deque[tuple[ref[Parcel], int | None]] = deque()
        self._pending_bytes = 0
        self.is_due = False
        self.waiting: list[ref[Parcel]] = []

    def begin(self, step: SeenStep, parcel: Parcel, sequence: int | None) -> None:
        """A new value: send it, keep it, or let it wait for the operator of that sequence number to run.

        Operators may write into what they have saved, RReLU into its noise; but not into values with a history, which
        other operators made. Those leave at once (`sequence` is None), unless they are small; and with each large one
        the small ones before it, so that values leave in their order, as the timetable has it.
        """
        number, sends, size = parcel.number, step.sends, parcel.kind.size
        if sends[number] if sends is not None else self._sends(step, parcel):
            if sequence is None and size >= self._together:
                self._send((*self._take_pending(next_sequence()), parcel) if self.pending else (parcel,))
            else:
                self.pending.append((step.parcels[number], sequence))
                self._pending_bytes += size
                self.is_due = self._pending_bytes >= self._together
        else:
            parcel.stays = True
            self._transfers.accounts.stayed_bytes += parcel.kind.size
        due = step.releases.get(number)
        if due is not None or step.late:
            self._let_go(step, due or ())
        self._begun = self._transfers.turn

    def pass_by(self, step: SeenStep) -> None:
        """Forward passes a place without saving anything: let go of what will have left by now."""
        due = step.passes.get(step.passed)
        step.passed += 1
        if step.accounts.measures:
            step.note_passed()
        self._begun = self._transfers.turn
        if due is not None or step.late:
            self._let_go(step, due or ())

    def _sends(self, step: SeenStep, parcel: Parcel) -> bool:
        """Whether to send a value about which nothing is known yet."""
        if self._waits:
            return True
        self.release_done(step)
        return self._transfers.leaving_bytes + parcel.kind.size <= self._in_flight

    def flush(self, sequence: int | None) -> None:
        """Send what waits, if it is worth a copy, except what the operator that runs next is saving now.

        Args:
            sequence: that operator's number; None to have it asked for if it is needed.
        """
        if self.is_due:
            self._send(self._take_pending(next_sequence() if sequence is None else sequence))
        if self.waiting:
            self._send_unheld()

    def settle(self) -> None:
        """Send all that waits: no operator is running."""
        self._send(self._take_pending(None))
        if self.waiting:
            self._send_unheld()

    def _take_pending(self, sequence: int | None) -> list[Parcel]:
        """What may leave of all that waits: all that the operator of that sequence number is not saving now."""
        pending, ready = self.pending, []
        while pending and (sequence is None or pending[0][1] != sequence):
            one = pending.popleft()[0]
            parcel = one()
            if parcel is None:
                continue
            if parcel.step.sends is None and _may_be_held(parcel):
                self.waiting.append(one)
            else:
                ready.append(parcel)
        self._pending_bytes = sum(parcel.kind.size for one, _ in pending if (parcel := one()) is not None)
        self.is_due = self._pending_bytes >= self._together
        return ready

    def _send_unheld(self) -> None:
        waiting, self.waiting = self.waiting, []
        ready = []
        for one in waiting:
            parcel = one()
            if parcel is not None and _may_be_held(parcel):
                self.waiting.append(one)
            elif parcel is not None:
                ready.append(parcel)
        self._send(ready)

    def finish(self) -> None:
        """Forward is over: what somebody still holds is a buffer, an input, or the like, and stays."""
        self.settle()
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            parcel = one()
            if parcel is not None:
                parcel.stays = True
                parcel.step.held.add(parcel.number)
                self._transfers.accounts.stayed_bytes += parcel.kind.size

    def _send(self, parcels: Sequence[Parcel]) -> None:
        transfers = self._transfers
        transfers.send(parcels)
        if self._waits and parcels and transfers.leaving_bytes > self._in_flight:
            self._keep_in_flight(parcels[-1].step)

    def _keep_in_flight(self, step: SeenStep) -> None:
        """Wait for the oldest copies while too many are on their way."""
        while self._transfers.leaving_bytes > self._in_flight and len(step.leaving) > 1:
            oldest = step.parcels[step.leaving.popleft()]()
            if oldest is not None:
                self._transfers.note_written(oldest)
                self._transfers.release((oldest,))

    def release_done(self, step: SeenStep) -> None:
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

    def release_late(self, step: SeenStep) -> None:
        """Let go of what was to be let go before it had left; what comes after waits for it.

        Small values go when they have left: nothing waits for them.
        """
        if -1 in step.passes:
            self._begun = self._transfers.turn
            self._let_go(step, step.passes[-1])
        if step.late:
            self._transfers.release(step.live(step.late))
            step.late = []

    def _let_go(self, step: SeenStep, numbers: Sequence[int]) -> None:
        """Let go of the memory of what will have left by now, as the timetable has it.

        A copy that has only just begun is not waited for, but at the next value: it was to begin earlier. Nor is that
        of a small value, which left with a large one after it, or in a batch: it is let go with a large one that left
        later, or when there are enough of them.
        """
        known = [*step.late, *step.small, *numbers] if step.late or step.small else numbers
        step.late, step.small = [], []
        leaving: list[Parcel] = []
        small: list[Parcel] = []
        parcels, together, begun = step.parcels, self._together, self._begun
        last = small_bytes = 0
        for number in known:
            parcel = parcels[number]()
            if parcel is None or parcel.stays:
                continue
            has_begun, size = parcel.is_leaving and parcel.turn <= begun, parcel.kind.size
            if has_begun and size >= together:
                leaving.append(parcel)
                last = max(last, parcel.turn)
            elif has_begun:
                small.append(parcel)
                small_bytes += size
            elif parcel.alias is not None:
                (step.small if size < together else step.late).append(number)
        if small_bytes >= together:
            leaving += small
        elif small:
            leaving += [parcel for parcel in small if parcel.turn <= last]
            step.small += [parcel.number for parcel in small if parcel.turn > last]
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
