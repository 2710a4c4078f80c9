"""Returns: what a backward pass asks for, what is fetched ahead of that, and how long it is held."""

from __future__ import annotations

from collections.abc import Callable

from recollect._core.torch_private.engine import current_pass, when_pass_ends
from recollect._offload.learning import SessionOptions
from recollect._offload.parcels import Parcel
from recollect._offload.steps import SeenStep
from recollect._offload.transfers import Transfers

_NO_PASS = -1


class Returns:
    """The way back of a session's values.

    Args:
        options: of the session.
        transfers: what does the copying.
        end_pass: called when a backward pass is done.
    """

    __slots__ = ("_end_pass", "_in_flight", "_pass_id", "_steps", "_transfers", "_waits")

    def __init__(self, options: SessionOptions, transfers: Transfers, end_pass: Callable[[], None]) -> None:
        self._in_flight, self._waits, self._transfers = options.in_flight, options.waits, transfers
        self._end_pass = end_pass
        self._pass_id = _NO_PASS
        self._steps: set[SeenStep] = set()  # whose values came back since the last pass

    def note_asked(self, parcel: Parcel) -> None:
        """A saved tensor is asked for."""
        running = current_pass()
        if parcel.pass_id != running:
            if running != self._pass_id:
                self._begin_pass(running)
            parcel.pass_id, parcel.asked = running, parcel.users
            self._steps.add(parcel.step)

    def _begin_pass(self, running: int) -> None:
        if running != _NO_PASS:
            self.drop()  # of a pass that failed, which does not say so
            self._pass_id = running
            when_pass_ends(self._end_pass)

    def fetch_with(self, parcel: Parcel) -> None:
        """Begin the way back of a value, and of what will be asked for next."""
        step, transfers = parcel.step, self._transfers
        if parcel.alias is None and parcel.returned is None:
            transfers.fetch((parcel,))
        if step.flying:
            self._go_on(step)
        due = step.fetches.get(parcel.number)
        if due is not None:
            step.due.extend(due)
        if step.due:
            self._fetch_ahead(step)
        if parcel.is_flying:
            parcel.is_flying = False
            step.flying_bytes -= parcel.kind.size

    def _go_on(self, step: SeenStep) -> None:
        """What a slower tier has given back meanwhile goes on to the device."""
        ready = [
            parcel
            for parcel in step.live(list(step.flying))
            if parcel.reading is not None and parcel.reading.future.done()
        ]
        step.flying.difference_update(parcel.number for parcel in ready)
        self._transfers.fetch(ready)

    def _fetch_ahead(self, step: SeenStep) -> None:
        # Late in backward there is room enough for what a timetable has chosen not to wait for.
        is_bounded = self._waits or step.sends is None
        due, parcels, flying_bytes = step.due, step.parcels, step.flying_bytes
        fetched: list[Parcel] = []
        while due:
            parcel = parcels[due[0]]()
            if parcel is not None and parcel.alias is None and parcel.returned is None and not parcel.is_used:
                size = parcel.kind.size
                if is_bounded and flying_bytes and flying_bytes + size > self._in_flight:
                    break
                fetched.append(parcel)
                if not parcel.is_flying:
                    parcel.is_flying = True
                    flying_bytes += size
                parcel.asked = parcel.asked or 1
            due.popleft()
        step.flying_bytes = flying_bytes
        if fetched:
            self._steps.add(step)
            self._transfers.fetch(fetched)
            if self._transfers.slow is not None:
                step.flying.update(parcel.number for parcel in fetched if parcel.reading is not None)

    def note_given(self, parcel: Parcel) -> None:
        """A saved tensor was given; after the last of its value's, what came back is held no longer."""
        parcel.asked -= 1
        if parcel.asked <= 0 or parcel.pass_id == _NO_PASS:
            parcel.asked, parcel.returned = 0, None

    def drop(self) -> None:
        """The pass is done: hold nothing that came back."""
        self._pass_id = _NO_PASS
        steps, self._steps = self._steps, set()
        for step in steps:
            for one in step.parcels:
                parcel = one()
                if parcel is not None:
                    self._transfers.drop_returned(parcel)
                    parcel.asked, parcel.is_flying = 0, False
            step.flying_bytes = 0
            step.flying.clear()
