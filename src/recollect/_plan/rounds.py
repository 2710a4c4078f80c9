"""Steps that run forward and backward several times: the part of such a step that a plan is made from.

A *round* is one forward and its backward, with what the optimizer does after it. Gradient accumulation, LBFGS and SAM
run several in a step, one after the other. Regions work in each of them, so the round with the highest peak decides.
What it does not make itself, such as the gradients of rounds before it, is there throughout. A GAN's generator runs
before the backward of its discriminator and is trained after it: such rounds are planned together.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

from recollect._core.calls import Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import Profile


def take_round(profile: Profile) -> Profile:
    """The round with the highest peak as a step of its own, with the time of all; the same profile if it has one round.

    Rounds of which a later one needs what an earlier one saved are taken together.
    """
    starts = find_rounds(profile)
    if len(starts) == 1:
        return profile
    stops = [*starts[1:], len(profile.calls)]
    rounds = _join_rounds(profile, [range(start, stop) for start, stop in zip(starts, stops, strict=True)])
    bytes_at = profile.timeline.bytes_at
    return _cut(profile, max(rounds, key=lambda one: max(bytes_at[one.start : one.stop])))


def _join_rounds(profile: Profile, rounds: Sequence[range]) -> list[range]:
    """The rounds, those from one that saves a value to one that reads it as a single one."""
    starts = [one.start for one in rounds]
    last = list(range(len(rounds)))  # of each, the last that it belongs together with
    needed = [(edge.by, edge.reader) for edge in profile.saved if edge.reader is not None]
    needed += [(call.forward, number) for number, call in enumerate(profile.calls) if call.forward is not None]
    for by, reader in needed:
        own = bisect.bisect_right(starts, by) - 1
        last[own] = max(last[own], bisect.bisect_right(starts, reader) - 1)
    joined: list[range] = []
    until = -1
    for number, one in enumerate(rounds):
        if number <= until:
            joined[-1] = range(joined[-1].start, one.stop)
        else:
            joined.append(one)
        until = max(until, last[number])
    return joined


def find_forward(profile: Profile) -> list[int]:
    """The calls of forward, up to the last one of a module: what follows backward otherwise is not planned."""
    calls, first = profile.calls, profile.forward_count
    last = first - 1
    if len(find_rounds(profile)) > 1:
        last = max(at for at, call in enumerate(calls) if call.phase is Phase.FORWARD and call.module)
    return [number for number in range(last + 1) if calls[number].phase is Phase.FORWARD]


def find_rounds(profile: Profile) -> list[int]:
    """The first call of each round; a step with one forward and one backward has one."""
    starts, first, has_backward = [0], 0, False
    for number, call in enumerate(profile.calls):
        if call.phase is not Phase.FORWARD:
            first, has_backward = number + 1, True
        elif has_backward and call.outputs and call.module:
            starts.append(first)
            has_backward = False
    return starts


def _cut(profile: Profile, own: range) -> Profile:
    """A round by itself. Its calls take as much longer as the whole step does, for regions work in all rounds."""
    whole = sum(call.seconds or 0.0 for call in profile.calls)
    part = sum(profile.calls[at].seconds or 0.0 for at in own)
    factor = whole / part if part else 1.0
    calls = [profile.calls[at] for at in own]
    used = {value.storage for call in calls for value in (*call.inputs, *call.outputs)}.union(
        *(call.writes for call in calls), (edge.storage for edge in profile.saved if edge.by in own)
    )
    spans = profile.timeline.spans
    kept = [
        at
        for at, (start, end) in enumerate(spans)
        if at in used or (start < own.stop and (end is None or end > own.start))
    ]
    numbers = {at: number for number, at in enumerate(kept)}
    return replace(
        profile,
        storages=tuple(_cut_storage(profile.storages[at], *spans[at], own) for at in kept),
        calls=tuple(_cut_call(call, numbers, own, factor) for call in calls),
        saved=tuple(
            Saved(
                storage=numbers[edge.storage],
                by=edge.by - own.start,
                reader=None if edge.reader is None else edge.reader - own.start,
            )
            for edge in profile.saved
            if edge.by in own
        ),
        transfers=(),
        received=tuple(
            replace(
                one,
                call=one.call - own.start,
                storages=tuple(numbers[at] for at in one.storages if at in numbers),
            )
            for one in profile.received
            if one.call in own
        ),
        under_regions=None,
    )


def _cut_storage(storage: Storage, start: int, end: int | None, own: range) -> Storage:
    stays = end is None or end > own.stop
    freed = None if end is None or stays else max(0, end - own.start)
    seen = storage.in_variable_until
    until = None if seen is None else min(max(0, seen - own.start), len(own))
    if start < own.start:
        return replace(storage, lifetime=Lifetime.STEP, made_at=None, freed_at=freed, in_variable_until=until)
    made = min(start - own.start, len(own))
    lifetime = Lifetime.RETURNED if stays else storage.lifetime
    freed = freed if freed is None else max(made, freed)
    return replace(storage, lifetime=lifetime, made_at=made, freed_at=freed, in_variable_until=until)


def _cut_call(call: OpCall, numbers: dict[int, int], own: range, factor: float) -> OpCall:
    def cut(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(replace(value, storage=numbers[value.storage]) for value in values)

    def longer(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * factor

    return replace(
        call,
        inputs=cut(call.inputs),
        outputs=cut(call.outputs),
        writes=tuple(numbers[at] for at in call.writes),
        forward=call.forward - own.start if call.forward is not None and call.forward in own else None,
        seconds=longer(call.seconds),
        device_s=longer(call.device_s),
        host_s=longer(call.host_s),
    )
