"""What a reader wants to know first: does the step fit, where is its peak, what would help, and the line to paste.

No torch here. Everything else in a report is the evidence for this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recollect._core.calls import Category, Phase, has_cross_entropy
from recollect._core.families import Families
from recollect._core.gains import Gain
from recollect._core.held import find_held
from recollect._core.numbers import format_flops, format_seconds, format_share
from recollect._core.patterns import compile_pattern
from recollect._core.profiles import Profile
from recollect._core.spelling import choose_words
from recollect._core.units import format_bytes
from recollect._report.summary import PeakRow, find_peak

_MOST = 3
_LEAST = 0.02  # of the peak: what lowers it by less is not worth a line
_WORTH = 0.25  # of the most that can be gained: less is no alternative to it
_MUCH = 0.25  # of the peak: what makes up as much of it is worth a word
_FRAGMENTED = 0.1  # of what the allocator holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Something that lowers the peak.

    Attributes:
        what: to do, in words: ``"recompute layers.* (12 Block)"``.
        gives: what that gives and costs, in words.
        code: the line to paste, with ``model`` for the model.
        peak_bytes: the step's peak then; None where nobody can say.
    """

    what: str
    gives: str
    code: str
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The head of a report.

    Attributes:
        fits: whether the step fits on its device; None if it is not known what that has.
        fit: the same in words, with the numbers.
        peak: where the peak is, in words.
        suggestions: the best, at most three.
    """

    fits: bool | None
    fit: str
    peak: str
    suggestions: tuple[Suggestion, ...]


def answer(profile: Profile, gains: Sequence[Gain] = ()) -> Answer:
    """Say whether a step fits, where its peak is, and what would help.

    Args:
        profile: the step.
        gains: what recomputing modules would free, as `find_gains` finds it.

    >>> step = Profile(storages=(), calls=(), fixed_bytes=2**30, capacity_bytes=2**33, device="NVIDIA H200")
    >>> answer(step).fit
    'It fits: the peak is 1.00 GiB of the 8.00 GiB of NVIDIA H200, 88% to spare.'
    """
    peak = find_peak(profile)
    has = profile.capacity_bytes
    return Answer(
        fits=peak.bytes <= has if has else None,
        fit=_say_fit(profile, peak.bytes),
        peak=f"The peak is {format_bytes(peak.bytes)}, {peak.sentence}.",
        suggestions=tuple(_suggest(profile, peak, gains))[:_MOST] if peak.bytes else (),
    )


def _say_fit(profile: Profile, peak_bytes: int) -> str:
    has, device = profile.capacity_bytes, profile.device or "the device"
    if not has:
        how = choose_words(
            'recollect.profile(..., dry=True, device="H100")', "recollect profile ... --dry --device H100"
        )
        return f"To see if it fits on a GPU, estimate it for one: {how}."
    would = "would " if profile.is_dry else ""
    if peak_bytes > has:
        return (
            f"It {would or 'does '}not fit: the peak is {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - has)} "
            f"more than the {format_bytes(has)} of {device}."
        )
    spare = format_share(has - peak_bytes, has)
    fits = "would fit" if profile.is_dry else "fits"
    return (
        f"It {fits}: the peak is {format_bytes(peak_bytes)} of the {format_bytes(has)} of {device}, {spare} to spare."
    )


def _suggest(profile: Profile, peak: PeakRow, gains: Sequence[Gain]) -> Iterator[Suggestion]:
    """What would help, best first: what the peak is made of decides what is said before and after recomputing."""
    if peak.phase is Phase.OPTIMIZER:
        yield _suggest_optimizer(profile)
    yield from _suggest_gains(profile, peak, gains)
    yield from _suggest_cache(profile, peak)
    if peak.by_category.get(Category.LOSS_HEAD, 0) > _MUCH * peak.bytes and has_cross_entropy(profile.calls):
        yield Suggestion(
            what="compute the loss in chunks: the last linear layer and cross_entropy in one",
            gives=f"the loss head is {format_bytes(peak.by_category[Category.LOSS_HEAD])} of the peak",
            code="loss = recollect.linear_cross_entropy(hidden, head.weight, targets)",
        )
    yield from _suggest_allocator(profile)
    if (
        peak.by_category.get(Category.OPTIMIZER, 0) + peak.by_category.get(Category.PARAMETER, 0)
        > 2 * _MUCH * peak.bytes
    ):
        yield Suggestion(
            what="shard parameters and optimizer state over several GPUs",
            gives="recomputing does not lower what they take",
            code="torch.distributed.fsdp.fully_shard(model)",
        )


def _suggest_gains(profile: Profile, peak: PeakRow, gains: Sequence[Gain]) -> Iterator[Suggestion]:
    for gain in choose_gains(fold_gains(profile, gains), peak.bytes, profile.capacity_bytes):
        change = (gain.peak_bytes - peak.bytes) / peak.bytes
        cost = _say_cost(gain, profile.step_s)
        fits = ""
        if peak.bytes > profile.capacity_bytes > 0:
            fits = ", fits" if gain.peak_bytes <= profile.capacity_bytes else ", does not fit yet"
        yield Suggestion(
            what=describe_gain(gain),
            gives=f"peak {format_bytes(gain.peak_bytes)} ({change:+.0%}{fits}) for {cost}",
            code=write_code(gain, profile),
            peak_bytes=gain.peak_bytes,
        )


def _say_cost(gain: Gain, step_s: float | None) -> str:
    if gain.recompute_s is None:
        return f"{format_flops(gain.recompute_flops)} more"
    share = f" ({gain.recompute_s / step_s:+.0%})" if step_s else ""
    return f"{format_seconds(gain.recompute_s)} more{share}"


def describe_gain(gain: Gain) -> str:
    """What is recomputed, in words.

    >>> describe_gain(Gain(path="layers.*", kind="Block", count=12, freed_bytes=1, peak_bytes=1, recompute_s=None,
    ...     recompute_flops=0))
    'recompute layers.* (12 Block)'
    """
    path = gain.path or "the model"
    kind = f"{gain.count} {gain.kind}" if gain.count > 1 else gain.kind
    second = "every second of " if gain.every > 1 else ""
    keeping = "" if gain.policy == "full" else f", {gain.policy}"
    return f"recompute {second}{path} ({kind}){keeping}"


def fold_gains(profile: Profile, gains: Sequence[Gain]) -> list[Gain]:
    """Those of families, and of modules that belong to none."""
    families = Families(profile.modules)
    together = {gain.path for gain in gains if gain.count > 1}
    return [gain for gain in gains if gain.count > 1 or gain.every > 1 or families.name(gain.path) not in together]


def choose_gains(gains: Sequence[Gain], peak_bytes: int, capacity_bytes: int = 0) -> list[Gain]:
    """The choices worth naming: none of them has another that lowers the peak as far for less.

    If the step does not fit, the cheapest that makes it fit comes first; else the one that lowers the peak most. Then
    those that lower it most for what they cost.
    """

    def cost(gain: Gain) -> float:
        return gain.recompute_flops if gain.recompute_s is None else gain.recompute_s

    lower = [gain for gain in gains if gain.peak_bytes < (1 - _LEAST) * peak_bytes]
    best: list[Gain] = []
    for gain in sorted(lower, key=lambda gain: (gain.peak_bytes, cost(gain), -gain.count, gain.path)):
        if not best or cost(gain) < cost(best[-1]):
            best.append(gain)
    if not best:
        return []
    fitting = [gain for gain in best if peak_bytes > capacity_bytes > 0 and gain.peak_bytes <= capacity_bytes]
    first = min(fitting, key=cost) if fitting else best[0]
    most = peak_bytes - best[0].peak_bytes
    rest = [gain for gain in best if gain is not first and peak_bytes - gain.peak_bytes >= _WORTH * most]
    rest.sort(key=lambda gain: cost(gain) / (peak_bytes - gain.peak_bytes))
    return [first, *rest]


def write_code(gain: Gain, profile: Profile) -> str:
    """The line that does it."""
    if not gain.path:
        return "recollect.checkpoint(model)(inputs)"
    every = f", every={gain.every}" if gain.every > 1 else ""
    return f'recollect.apply(model, {{{_write_key(gain, profile)}: "{gain.policy}"}}{every})'


def _write_key(gain: Gain, profile: Profile) -> str:
    """The pattern, if it means these modules and no others; else the class of them, which does."""
    if gain.count == 1 and gain.every == 1:
        return json.dumps(gain.path)
    matches = compile_pattern(gain.path)
    kinds = {module.kind for module in profile.modules if module.path and matches(module.path)}
    if kinds <= {gain.kind}:
        return json.dumps(gain.path)
    parts = re.escape(gain.path).replace(r"\*", r"\d+")
    return f'r"re:{parts}"'


def _suggest_optimizer(profile: Profile) -> Suggestion:
    name = profile.optimizer or "AdamW"
    return Suggestion(
        what="update parameters without temporaries",
        gives="the peak is in the optimizer's step, which recomputing does not lower",
        code=f"torch.optim.{name}(model.parameters(), fused=True)",
    )


def _suggest_cache(profile: Profile, peak: PeakRow) -> Iterator[Suggestion]:
    held = sum(profile.timeline.sizes[storage] for storage in find_held(profile))
    if held > _LEAST * peak.bytes:
        yield Suggestion(
            what="do not fill a key/value cache while training",
            gives=f"{format_bytes(held)} of what forward saves is also held by a cache or a list until the step ends",
            code="model.config.use_cache = False",
        )


def _suggest_allocator(profile: Profile) -> Iterator[Suggestion]:
    for entry in profile.allocators:
        unused = entry.reserved_bytes - entry.peak_bytes
        if unused > _FRAGMENTED * entry.reserved_bytes:
            yield Suggestion(
                what="let the allocator join pieces",
                gives=f"{format_bytes(unused)} of {entry.device} is reserved and not used",
                code="PYTORCH_ALLOC_CONF=expandable_segments:True python train.py",
            )
            return
