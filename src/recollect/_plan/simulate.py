"""The judge of all plans: which memory a step takes, call by call, when some values are kept and the rest made again.

Recomputation stands just before the first use in backward. Where what it reads is gone too, that is made again first,
in the order of forward. A value is made again at most once, and freed after its last use. It does not say which of the
choices is best, whether a call may be run again (see `OpCall.runs_once`), or what fragmentation adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recollect._core.calls import Lifetime, Phase
from recollect._core.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run of a call.

    Attributes:
        call: its index in the profile.
        again: whether it is a forward call that backward runs once more.
    """

    call: int
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        steps: the schedule.
        bytes_at: bytes in use while each step runs, what it makes and what it reads included.
        backward_start: the first step of backward.
        held_bytes: of storages that are there before and after: parameters, buffers, inputs. Part of all other numbers.
        saved_bytes: what stays between forward and backward beyond those.
        recomputed_flops: floating-point operations of the calls that run again.
        recomputed_s: their seconds; None if one has no time.
    """

    steps: tuple[Step, ...]
    bytes_at: tuple[int, ...]
    backward_start: int
    held_bytes: int
    saved_bytes: int
    recomputed_flops: int
    recomputed_s: float | None

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at a time."""
        return max(self.bytes_at, default=self.held_bytes)

    @property
    def peak_step(self) -> int:
        """The first step at which that many are."""
        return self.bytes_at.index(self.peak_bytes)

    @property
    def backward_peak_bytes(self) -> int:
        """The most bytes in use at a time in backward, recomputation included."""
        return max(self.bytes_at[self.backward_start :], default=self.held_bytes + self.saved_bytes)

    @property
    def recomputed_calls(self) -> tuple[int, ...]:
        """The calls that run again, in the order in which they do."""
        return tuple(step.call for step in self.steps if step.again)


def simulate(profile: Profile, kept: Collection[int]) -> Simulation:
    """Judge keeping these storages for backward; all other that it needs are made again.

    What is there anyway need not be named: storages that live through the step, and what forward returns. Those that
    backward does not need in the end are not kept, named or not. To judge many keep sets make one `Simulator`.

    Args:
        profile: the step.
        kept: indices of storages.

    >>> from recollect._core.calls import OpCall, Phase, Storage, Value
    >>> def call(op, reads, makes, phase=Phase.FORWARD):
    ...     return OpCall(op=op, phase=phase, flops=1, inputs=tuple(Value(storage=at) for at in reads),
    ...         outputs=tuple(Value(storage=at) for at in makes))
    >>> sizes = (Storage(bytes=1, lifetime=Lifetime.STEP), *(Storage(bytes=10) for _ in range(4)))
    >>> forward = (call("sin", [0], [1]), call("exp", [1], [2]), call("sum", [2], [3]))
    >>> step = Profile(storages=sizes, calls=(*forward, call("sum_backward", [2], [4], Phase.BACKWARD)))
    >>> simulate(step, kept={2}).saved_bytes, simulate(step, kept={1}).recomputed_calls
    (10, (1,))
    >>> simulate(step, kept=()).bytes_at
    (11, 21, 21, 11, 21, 21)
    """
    return Simulator(profile).run(kept)


class Simulator:
    """Judges keep sets and schedules of one step: what they have in common is worked out once.

    Raises:
        ValueError: forward goes on after backward began.
    """

    def __init__(self, profile: Profile) -> None:
        calls, storages = profile.calls, profile.storages
        self.profile = profile
        self._forward_count = profile.forward_count
        for number in range(self._forward_count, len(calls)):
            if calls[number].phase is Phase.FORWARD:
                message = (
                    f"call {number} ({calls[number].op}) belongs to forward and comes after backward has begun: only a "
                    "step with one forward and one backward can be simulated"
                )
                raise ValueError(message)
        self._reads = [tuple(call.reads) for call in calls]
        self._makes = [tuple(dict.fromkeys(value.storage for value in call.outputs)) for call in calls]
        self._sizes = [storage.bytes for storage in storages]
        self._stays = [storage.lifetime in (Lifetime.STEP, Lifetime.RETURNED) for storage in storages]
        self._held = [at for at, storage in enumerate(storages) if storage.lifetime is Lifetime.STEP]
        self._given = [at for at, storage in enumerate(storages) if storage.lifetime is Lifetime.GIVEN]
        self._makers = self._find_makers()
        returned = [at for at in self._makers if storages[at].lifetime is Lifetime.RETURNED]
        self._always = frozenset([*self._held, *self._given, *returned])
        self._plain = [Step(call=number) for number in range(len(calls))]
        self._again = [Step(call=number, again=True) for number in range(self._forward_count)]
        self._workspaces = [call.workspace_bytes for call in calls]

    def run(self, kept: Collection[int]) -> Simulation:
        """Judge a keep set; see `simulate`."""
        return self.measure(self.schedule(kept), kept)

    def schedule(self, kept: Collection[int]) -> tuple[Step, ...]:
        """The order of running: forward, then backward with each recomputation just before its first use."""
        there = {*self._always, *kept}
        steps = self._plain[: self._forward_count]
        for number in range(self._forward_count, len(self._reads)):
            if not there.issuperset(self._reads[number]):
                missing = [storage for storage in self._reads[number] if storage not in there]
                for other in self._calls_for(missing, there):
                    there.update(self._makes[other])
                    steps.append(self._again[other])
            there.update(self._makes[number])
            steps.append(self._plain[number])
        return tuple(steps)

    def measure(self, steps: Sequence[Step], kept: Collection[int]) -> Simulation:
        """The memory that any schedule takes: `schedule`'s or one of a solver's own.

        Raises:
            ValueError: a step reads a storage that is not there then.
        """
        calls, first = self.profile.calls, self._forward_count
        backward_start = next((at for at, step in enumerate(steps) if step.again or step.call >= first), len(steps))
        copies = [_Copy(storage, 0) for storage in self._held]
        now = {copy.storage: copy for copy in copies}
        transient = []  # the bytes that each step takes only while it runs
        for at, step in enumerate(steps):
            if at == backward_start:
                there = {*self._always, *kept}
                now = {storage: copy for storage, copy in now.items() if storage in there}
                now |= {storage: _Copy(storage, at) for storage in self._given}
                copies += [now[storage] for storage in self._given]
            call = step.call
            passing, reads = self._workspaces[call], self._reads[call]
            for storage in reads:  # by far the most of what a solver does: nothing is called in these loops
                copy = now.get(storage)
                if copy is None:
                    raise ValueError(self._say_missing(at, call, storage))
                copy.last_use = at
            for storage in self._makes[call]:
                if storage not in now:
                    now[storage] = copy = _Copy(storage, at)
                    copies.append(copy)
                elif step.again and storage not in reads:
                    passing += self._sizes[storage]  # a second one beside the one that is there, dropped at once
            transient.append(passing)
        again = [calls[step.call] for step in steps if step.again]
        seconds = [call.seconds for call in again if call.seconds is not None]
        return Simulation(
            steps=tuple(steps),
            bytes_at=self._sweep(copies, transient),
            backward_start=backward_start,
            held_bytes=sum(self._sizes[at] for at in self._held),
            saved_bytes=sum(
                self._sizes[copy.storage]
                for copy in copies[len(self._held) :]
                if copy.made_at < backward_start and (self._stays[copy.storage] or copy.last_use >= backward_start)
            ),
            recomputed_flops=sum(call.flops for call in again),
            recomputed_s=sum(seconds) if len(seconds) == len(again) else None,
        )

    def _find_makers(self) -> dict[int, list[int]]:
        """For each storage, the forward calls that make it: the first one on it, and those that write into it later."""
        makers: dict[int, list[int]] = {}
        for number in range(self._forward_count):
            for storage in self._makes[number]:
                if storage not in makers and storage not in self._reads[number]:
                    makers[storage] = [number]
            for storage in self.profile.calls[number].writes:
                if storage in makers:
                    makers[storage].append(number)
        return makers

    def _calls_for(self, missing: list[int], there: set[int]) -> list[int]:
        """The forward calls to run again for these storages, and for what those calls read and is not there."""
        needed: set[int] = set()
        while missing:
            for number in self._makers.get(missing.pop(), ()):
                if number not in needed:
                    needed.add(number)
                    missing += [read for read in self._reads[number] if read not in there]
        return sorted(needed)

    def _say_missing(self, at: int, call: int, storage: int) -> str:
        return f"step {at} ({self.profile.calls[call].op}) reads storage {storage}, which is not in memory"

    def _sweep(self, copies: list[_Copy], transient: list[int]) -> tuple[int, ...]:
        """The bytes in use during each step."""
        change = [0] * (len(transient) + 1)
        for copy in copies:
            change[copy.made_at] += self._sizes[copy.storage]
            if not self._stays[copy.storage]:
                change[copy.last_use + 1] -= self._sizes[copy.storage]
        in_use = itertools.accumulate(change)
        return tuple(lasting + passing for lasting, passing in zip(in_use, transient, strict=False))


class _Copy:
    """A storage's memory from one making to its last use."""

    __slots__ = ("last_use", "made_at", "storage")

    def __init__(self, storage: int, made_at: int) -> None:
        self.storage = storage
        self.made_at = made_at
        self.last_use = made_at
