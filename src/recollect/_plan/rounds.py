"""Steps that run forward and backward several times: the part of such a step that a plan is made from.

A *round* is one forward and its backward, with what the optimizer does after it. Gradient accumulation, LBFGS and SAM
run several in a step, one after the other. Regions work in each of them, so the round with the highest peak decides.
What it does not make itself, such as the gradients of rounds before it, is there throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recollect._core.calls import Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import Profile


def take_round(profile: Profile) -> Profile:
    """The round with the highest peak as a step of its own, with the time of all; the same profile if it has one round.

    Raises:
        ValueError: backward needs what was saved for it in another round.
    """
    starts = find_rounds(profile)
    if len(starts) == 1:
        return profile
    stops = [*starts[1:], len(profile.calls)]
    rounds = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
    for edge in profile.saved:
        own = next(one for one in rounds if edge.by in one)
        if edge.reader is not None and edge.reader not in own:
            _refuse(profile, edge, own)
    bytes_at = profile.timeline.bytes_at
    return _cut(profile, max(rounds, key=lambda one: max(bytes_at[one.start : one.stop])))


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


def _refuse(profile: Profile, edge: Saved, own: range) -> None:
    call = profile.calls[edge.by]
    later = next(
        at for at in range(own.stop, len(profile.calls)) if profile.calls[at].phase is Phase.FORWARD and at != edge.by
    )
    message = (
        f"the step runs a forward after backward has begun (from call {later}, {profile.calls[later].op} in "
        f"{profile.calls[later].module or profile.calls[later].source or 'the step'}), and a later backward needs what "
        f"call {edge.by} ({call.op} in {call.module or call.source or 'the step'}) saved before that: only forwards "
        "whose backward comes before the next forward can be planned.\n"
        "For a step that trains several models in turn, as GANs do, pass the part that trains this one"
    )
    raise ValueError(message)


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
