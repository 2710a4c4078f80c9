"""Which calls of forward cast or copy what a call of torch is given: these can run again without the rest of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from recollect._core.calls import Category
from recollect._core.profiles import Profile

_CAST, _COPY, _HALVES = "aten._to_copy.default", "aten.clone.default", ("bfloat16", "float16")


def find_inner_casts(
    profile: Profile, reads: Sequence[Collection[int]], makes: Sequence[Sequence[int]]
) -> frozenset[int]:
    """Casts and copies of what a call of torch is given: of nothing that it makes or overwrites, no view of its own.

    Args:
        profile: the step.
        reads: by call, the storages that it reads.
        makes: by call, the storages that it makes.
    """
    found = set[int]()
    for within, group in itertools.groupby(range(profile.forward_count), key=lambda at: profile.calls[at].within):
        numbers = list(group)
        if within is None or len(numbers) == 1:
            continue
        others = {storage for number in numbers for storage in (*makes[number], *profile.calls[number].writes)}
        copied = set[int]()
        for at in numbers:
            call = profile.calls[at]
            if call.op in (_CAST, _COPY) and makes[at] and others.isdisjoint(reads[at]):
                found.add(at)
                others.difference_update(makes[at])  # what is cast may be copied then
                copied.update(makes[at])
            else:  # of what the call is given, the executor copies all, not a view that the call makes of it
                others.update(value.storage for value in call.outputs if value.storage not in copied)
    return frozenset(found)


def find_casts(profile: Profile) -> frozenset[int]:
    """Casts from full to half precision, if autocast seems to have made some: of parameters, inside of other calls."""
    numbers = [
        number
        for number in range(profile.forward_count)
        if profile.calls[number].op == _CAST
        and [value.dtype for value in profile.calls[number].inputs] == ["float32"]
        and all(value.dtype in _HALVES for value in profile.calls[number].outputs)
    ]
    weights = [
        number
        for number in numbers
        if any(profile.storages[value.storage].category is Category.PARAMETER for value in profile.calls[number].inputs)
    ]
    return frozenset(numbers if weights else ())
