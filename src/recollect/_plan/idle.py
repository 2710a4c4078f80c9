"""Modules that did not run in the profiled step, but may in others: layers that are dropped at random, idle experts.

Nothing is known of them but that others of their class stand beside them in the same list. What is planned for one of
those holds for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from recollect._core.calls import Category
from recollect._core.forecasts import PlannedRegion
from recollect._core.plans import Choice
from recollect._plan.problem import Problem


def find_idle(problem: Problem, regions: Iterable[PlannedRegion]) -> dict[str, PlannedRegion]:
    """The modules that did not run and are like a region, each with that region."""
    like: dict[tuple[str, str], PlannedRegion] = {}
    for region in regions:
        for place in _places(region.path):
            like.setdefault((place, region.kind), region)
    if not like:
        return {}
    ran = {call.module for call in problem.calls}
    around = {path[:at] for path in ran for at in (*_dots(path), len(path))}
    found: dict[str, PlannedRegion] = {}
    for module in problem.profile.modules:
        if module.path not in around:
            known = [one for place in _places(module.path) if (one := like.get((place, module.kind))) is not None]
            if known:
                found[module.path] = known[-1]
    return found


def plan_idle(
    problem: Problem, idle: dict[str, PlannedRegion], choices: Iterable[Choice]
) -> tuple[list[PlannedRegion], list[Choice]]:
    """What becomes of them: what becomes of those that they are like."""
    written = list(choices)
    regions = [
        replace(
            like,
            path=path,
            plain_bytes=0,
            kept_bytes=0,
            offloaded_bytes=0,
            again_s=0.0,
            joined_to="",
            parameter_bytes=_count_parameters(problem, path),
        )
        for path, like in idle.items()
    ]
    return regions, [choice for path, like in idle.items() for choice in _copy(written, like.path, path)]


def describe_idle(idle: dict[str, PlannedRegion]) -> list[str]:
    """What to say of them."""
    if not idle:
        return []
    first = next(iter(idle))
    others = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
    said = f"{first}{others} did not run in the profiled step: planned like {idle[first].path}. "
    return [said + "A step in which more modules run takes more memory than predicted"]


def _copy(choices: Iterable[Choice], path: str, other: str) -> Iterator[Choice]:
    for choice in choices:
        if choice.region == path and choice.module is not None and choice.module.startswith(path):
            yield replace(choice, region=other, module=other + choice.module.removeprefix(path))


def _count_parameters(problem: Problem, path: str) -> int:
    return sum(
        storage.bytes
        for storage in problem.profile.storages
        if storage.category is Category.PARAMETER and (storage.name or "").startswith(f"{path}.")
    )


def _dots(path: str) -> list[int]:
    return [found.start() for found in re.finditer(r"\.", path)]


def _places(path: str) -> list[str]:
    """The path with one of its numbers left out, each in turn.

    >>> _places("stages.1.blocks.0")
    ['stages.*.blocks.0', 'stages.1.blocks.*']
    """
    parts = path.split(".")
    return [".".join([*parts[:at], "*", *parts[at + 1 :]]) for at, part in enumerate(parts) if part.isdecimal()]
