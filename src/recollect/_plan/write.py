"""Writes what was chosen as a Plan: regions by path, kept values by module, operator and call."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from recollect._core.calls import Category
from recollect._core.decisions import Decision
from recollect._core.forecasts import Fingerprint, PlannedRegion
from recollect._core.plans import Choice
from recollect._core.profiles import Profile
from recollect._plan.joins import find_joins
from recollect._plan.names import name_kept
from recollect._plan.options import Option
from recollect._plan.problem import Problem, Run
from recollect._plan.segments import Segment
from recollect._plan.treatments import PlannedWay, Treatment, find_held, find_recomputed, find_sent
from recollect._plan.ways import find_copied, find_kept_of

_MOST_WORDS, _CASTS = 4, "casts of weights"


def write_choices(problem: Problem, choice: Iterable[tuple[Segment, Option]]) -> Iterator[Choice]:
    """What is kept, value by value. A call's number is left out where all calls of the operator there are kept."""
    for segment, option in choice:
        run = segment.runs[0]
        kept = option.calls(problem, run)
        sent = option.calls_sent(problem, run)
        for decision, calls in ((Decision.OFFLOAD, kept & sent), (Decision.SAVE, kept - sent)):
            for (module, op), wanted in name_kept(problem, run, calls).items():
                for call in wanted:
                    yield Choice(
                        decision=decision,
                        region=_as_pattern(segment.path),
                        module=_as_pattern(module),
                        op=op,
                        call=call,
                    )


def write_regions(
    problem: Problem, choice: Iterable[tuple[Segment, Option]], tier: str = ""
) -> Iterator[PlannedRegion]:
    """The modules that become regions; `tier` is where values are sent, if some are."""
    owned: Counter[str] = Counter()
    for storage in problem.profile.storages:
        if storage.category is Category.PARAMETER and storage.name:
            owned[storage.name] += storage.bytes
    choice = list(choice)
    joined_to = _find_joined(problem, choice)
    for segment, option in choice:
        assert option.way is not None
        plain = kept = 0
        again_s = 0.0
        sent = set(find_sent(problem, segment.runs) if option.way is PlannedWay.OFFLOAD else ())
        for run, treatment in option.treat(problem, segment):
            mine = [storage for storage in run.needs | run.idle if problem.is_evictable(storage, run)]
            plain += sum(problem.sizes[storage] for storage in mine)
            again = find_recomputed(problem, run, treatment)
            again_s += sum(problem.seconds[call] for _, calls in again for call in calls)
            used = _find_used(problem, treatment, again) | run.needs
            sent.update(find_held(problem, run, treatment) if option.is_away else treatment.sent)
            kept += sum(problem.sizes[storage] for storage in (treatment.kept & used) - sent)
        yield PlannedRegion(
            path=segment.path,
            kind=segment.kind,
            way=option.way.value,
            plain_bytes=plain,
            kept_bytes=kept,
            offloaded_bytes=sum(problem.sizes[storage] for storage in sent),
            tier=tier if sent else "",
            again_s=again_s,
            parameter_bytes=sum(size for name, size in owned.items() if name.startswith(f"{segment.path}.")),
            keeps="all" if option.way is PlannedWay.OFFLOAD else _describe_kept(problem, segment.runs[0], option),
            joined_to=joined_to.get(segment.path, ""),
            keeps_casts=option.keeps_casts(problem, segment.runs[0]),
        )


def _find_joined(problem: Problem, choice: Iterable[tuple[Segment, Option]]) -> dict[str, str]:
    """The modules that forget what they were given, each with the one that makes it again."""
    chosen = [pair for segment, option in choice for pair in option.treat(problem, segment)]
    joins = find_joins(problem, chosen).values()
    return {chosen[join.taker][0].path: chosen[join.giver][0].path for join in joins}


def _find_used(problem: Problem, treatment: Treatment, again: list[tuple[int, list[int]]]) -> frozenset[int]:
    """The kept storages that recomputation starts from."""
    read = {storage for _, calls in again for call in calls for storage in problem.reads[call]}
    return treatment.kept.intersection(read)


def _describe_kept(problem: Problem, run: Run, option: Option) -> str:
    """What is kept, by operator: ``"mm x3, attention"``."""
    calls = sorted(option.calls(problem, run))
    if option.way is PlannedWay.REPLAY:
        treatment = Treatment(way=option.way, kept=option.storages(problem, run))
        used = set(_find_used(problem, treatment, find_recomputed(problem, run, treatment)) | run.needs)
        used.update(storage for storage, copies in find_copied(problem, run).items() if used.issuperset(copies))
        calls = [call for call in calls if used.intersection(find_kept_of(problem, run, call))]
    counts = Counter(_short(problem.calls[call].op) for call in calls)
    words = [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]
    words += [_CASTS] if option.keeps_casts(problem, run) else []
    more = len(words) - _MOST_WORDS
    return ", ".join(words[:_MOST_WORDS]) + (f" and {more} more" if more > 0 else "")


def _short(op: str) -> str:
    """An operator's name for people.

    >>> _short("aten.mm.default"), _short("aten._scaled_dot_product_flash_attention.default")
    ('mm', 'attention')
    """
    name = op.split(".")[1] if op.count(".") > 1 else op
    return "attention" if "attention" in name else name.strip("_")


def take_fingerprint(profile: Profile) -> Fingerprint:
    """What a plan for this profile is for."""
    modules = "\n".join(f"{module.path} {module.kind}" for module in profile.modules)
    sizes = [
        f"{storage.name} {storage.bytes}"
        for storage in profile.storages
        if storage.category in (Category.PARAMETER, Category.INPUT) and storage.made_at is None
    ]
    return Fingerprint(
        model=profile.name,
        modules=_digest(modules),
        shapes=_digest("\n".join(sizes)),
        torch=profile.torch,
        device=profile.device,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_pattern(path: str) -> str:
    """A pattern that matches this path alone."""
    return f"re:{re.escape(path)}" if re.search(r"[*?\[\]]", path) else path
