"""Memory over the step, by what it is for: the curve that plots and traces draw."""

from __future__ import annotations

import itertools

from recollect._core.calls import Category, Phase
from recollect._core.profiles import Profile


def follow_categories(profile: Profile) -> dict[Category, list[int]]:
    """The bytes of each category while each call runs; together they are the timeline's `bytes_at`.

    Workspace is among the temporaries. Categories that are never there are left out.

    >>> from recollect._core.calls import OpCall, Storage, Value
    >>> calls = (OpCall(op="a", outputs=(Value(storage=0),), workspace_bytes=2), OpCall(op="b"))
    >>> follow_categories(Profile(storages=(Storage(bytes=8),), calls=calls))
    {<Category.TEMPORARY: 'temporaries'>: [10, 0]}
    """
    count = len(profile.calls)
    changes = {category: [0] * (count + 3) for category in Category}
    for storage, size, (start, end) in zip(
        profile.storages, profile.timeline.sizes, profile.timeline.spans, strict=True
    ):
        changes[storage.category][start + 1] += size
        if end is not None:
            changes[storage.category][max(end, start) + 1] -= size
    sizes = {category: list(itertools.accumulate(steps))[1 : count + 1] for category, steps in changes.items()}
    for number, call in enumerate(profile.calls):
        sizes[Category.TEMPORARY][number] += call.workspace_bytes
        sizes[Category.LIBRARY][number] += profile.fixed_bytes
    return {category: values for category, values in sizes.items() if any(values)}


def find_stretches(profile: Profile) -> list[tuple[Phase, int, int]]:
    """The parts of the step in order: which phase, from which call, to before which.

    >>> from recollect._core.calls import OpCall
    >>> phases = (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD)
    >>> step = Profile(storages=(), calls=tuple(OpCall(op="op", phase=phase) for phase in phases))
    >>> [(phase.value, first, last) for phase, first, last in find_stretches(step)]
    [('forward', 0, 2), ('backward', 2, 3)]
    """
    found = []
    for phase, group in itertools.groupby(enumerate(profile.calls), key=lambda pair: pair[1].phase):
        numbers = [number for number, _ in group]
        found.append((phase, numbers[0], numbers[-1] + 1))
    return found
