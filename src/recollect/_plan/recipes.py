"""How candidates are made: the options of each segment of a chain, and which of them for so many bytes."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from recollect._plan.joins import find_joinable
from recollect._plan.options import PLAIN, Option, Weighed, move, place_of, weigh, without_worse
from recollect._plan.problem import Problem, Run
from recollect._plan.rehearse import Rehearsal
from recollect._plan.segments import Segment, find_parts
from recollect._plan.sent_modules import Extra, choose_sent
from recollect._plan.solvers.chain import can_fit, choose_options
from recollect._plan.solvers.keep_sets import find_keep_sets, find_served_sets, find_waist_sets
from recollect._plan.treatments import PlannedWay, Treatment, count_host, find_held, find_recomputed
from recollect._plan.ways import can_replay, cuts_by_choice, find_sendable, find_weight_casts, name_alike

_BUDGETS = 40
_CLOSER = 5  # times, before the second
_NARROWINGS = 12
_FEWER_BUDGETS = 28
_MOST_PRICES = 16
_MORE = 1 + 1e-6  # what has just this price is taken
_LITTLE_FOLLOWING = (None, PlannedWay.RERUN)
_LINK_SHARES = (0.7, 0.9, 1.0, 1.1)  # of its speed, for what replays send: other modules run beside them
_MOST_SENT = 12  # values of a run
_RUNS_AGAIN = (PlannedWay.RERUN, PlannedWay.SERVE, PlannedWay.REPLAY)
_ROWS = (2, 4, 8)  # of joined segments: made again at once, and so not many
_MOST_LINK_TIME = 1.5  # of a run's own time, for what it sends: some runs send less


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """How choices along a chain are found for any number of bytes.

    Attributes:
        chain: its segments.
        options: of each.
        rest_bytes: the most after the last segment's forward and before its backward.
        budgets: the numbers of bytes to begin with.
        parts: the segments inside of these, by their paths.
        extra: modules beside the chain, and what becomes of them.
    """

    chain: Sequence[Segment]
    options: Sequence[Sequence[Weighed]]
    rest_bytes: int
    budgets: tuple[int, ...]
    parts: dict[str, Segment]
    extra: Extra = ()

    def choose(self, budget_bytes: int) -> list[tuple[Segment, Option]]:
        """The quickest choice for so many bytes, as far as can be told before it is judged; nothing if none fits."""
        chosen = choose_options(self.options, self.rest_bytes, budget_bytes)
        found = [
            pair
            for segment, one in zip(self.chain, chosen or (), strict=False)
            for pair in _take_apart(self.parts, segment, one.option)
        ]
        found += self.extra if chosen else ()
        return sorted(found, key=lambda pair: pair[0].runs[0].first)


def find_bases(problem: Problem, chain: Sequence[Segment]) -> Iterator[Extra]:
    """What a search may begin with, beside nothing: letting go of all that is saved and never asked for is nearly free.

    It is gone before backward, so that choices along a chain, which see what is there between the two, do not find it.
    """
    yield ()
    if idle := tuple((one, Option(way=PlannedWay.RERUN)) for one in chain if all(not run.asks for run in one.runs)):
        yield idle


def list_recipes(problem: Problem, chain: Sequence[Segment], plain: Rehearsal, base: Extra = ()) -> Iterator[Recipe]:
    """For budgets from the smallest that can be reached to the plain peak: with whole modules sent, and without.

    Args:
        problem: the step.
        chain: its segments, without those of the base.
        plain: the step with nothing chosen but the base.
        base: see `find_bases`.
    """
    options = weigh_chain(problem, chain, plain)
    has_parts = any(weighed.option.parts for own in options for weighed in own)
    parts = {part.path: part for segment in chain if has_parts for part in find_parts(problem, segment)}
    last = chain[-1]
    start = min((run.start for run in last.runs if run.start is not None), default=problem.forward_count)
    rest = plain.most_bytes(last.runs[-1].stop, start)
    high = _find_smallest(options, rest, plain.peak_bytes)
    budgets = _spread(high, plain.peak_bytes, _BUDGETS)
    here = Recipe(chain=chain, options=options, rest_bytes=rest, budgets=budgets, parts=parts, extra=base)
    yield here
    if (fewer := _follow_fewer(problem, chain, options)) is not None:
        yield replace(here, options=fewer)
    for sent, extra in choose_sent(problem, chain):
        away = {at: weigh(problem, chain[at], Option(way=PlannedWay.OFFLOAD), plain) for at in sent}
        mixed = [[away[at]] if at in away else _keep_here(own) for at, own in enumerate(options)]
        lowest = max(0, high - sum(one.freed_bytes for one in away.values()))
        budgets = _spread(lowest, plain.peak_bytes, _FEWER_BUDGETS)
        yield replace(here, options=mixed, budgets=budgets, extra=(*base, *extra))
    for mixed, sent_bytes in _list_sending(problem, chain, options, plain):
        lowest = max(0, high - sent_bytes)
        yield replace(here, options=mixed, budgets=_spread(lowest, plain.peak_bytes, _FEWER_BUDGETS))
    yield from _list_rows(problem, here)
    yield from _list_holding_casts(problem, chain, plain, rest, base)


def _list_rows(problem: Problem, recipe: Recipe) -> Iterator[Recipe]:
    """A recipe with rows of joined segments, where these can do with fewer bytes."""
    followed = _follow_fewer(problem, recipe.chain, recipe.options) or recipe.options
    fewest, *_, most = recipe.budgets
    for size in _ROWS if problem.may_join else ():
        joined = _join(problem, recipe.chain, followed, size)
        lowest = _find_smallest(joined, recipe.rest_bytes, fewest)
        if lowest < fewest:
            yield replace(recipe, options=joined, budgets=_spread(lowest, most, _FEWER_BUDGETS))


def _list_holding_casts(
    problem: Problem, chain: Sequence[Segment], plain: Rehearsal, rest_bytes: int, base: Extra
) -> Iterator[Recipe]:
    """With options that hold casts of weights: what a choice frees is what it does for backward.

    Until forward is over autocast holds them anyway, and what is said of forward is too little; the judge sees it.
    """
    if not any(find_weight_casts(problem, run) for segment in chain for run in segment.runs[:1]):
        return
    options = weigh_chain(problem, chain, plain, holds_casts=True)
    lowest = _find_smallest(options, rest_bytes, plain.peak_bytes)
    budgets = _spread(lowest, plain.peak_bytes, _BUDGETS)
    recipe = Recipe(chain=chain, options=options, rest_bytes=rest_bytes, budgets=budgets, parts={}, extra=base)
    yield recipe
    if (fewer := _follow_fewer(problem, chain, options)) is not None:
        yield replace(recipe, options=fewer)
    yield from _list_rows(problem, recipe)


def _spread(low: int, high: int, steps: int) -> tuple[int, ...]:
    """Bytes from one number to another: evenly, and closer together at the low end, where plans differ most."""
    evenly = [low + (high - low) * number // steps for number in range(steps + 1)]
    closely = [low + (high - low) * number // (steps * _CLOSER) for number in range(1, _CLOSER)]
    return (low, *closely, *evenly[1:])


def _find_smallest(options: Sequence[Sequence[Weighed]], rest_bytes: int, high: int) -> int:
    """The fewest bytes that something is found for, nearly; `high` are enough."""
    low = 0
    for _ in range(_NARROWINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if can_fit(options, rest_bytes, middle) else (middle, high)
    return high


def list_away(problem: Problem, chain: Sequence[Segment]) -> Iterator[list[tuple[Segment, Option]]]:
    """Choices in which all segments of the most usual type send what they hold: so the link is used evenly."""
    if not problem.link_bytes_per_s:
        return
    ((usual, _),) = Counter(segment.type for segment in chain).most_common(1)
    alike = [segment for segment in chain if segment.type == usual]
    for option in find_options(problem, alike[0]):
        if option.sends:
            yield [(segment, option) for segment in alike]


def _follow_fewer(
    problem: Problem, chain: Sequence[Segment], options: Sequence[Sequence[Weighed]]
) -> Sequence[Sequence[Weighed]] | None:
    """Options with which only segments are replayed that the host can follow beside the device, one after the other.

    None if it can follow all of them, or none: then candidates for other paces have what is needed.
    """
    prices, replay = problem.prices, Treatment(way=PlannedWay.REPLAY)
    if prices.plain is None or prices.pace.counts_forward:
        return None
    spare, followed_s, found, count = prices.find_spare(), 0.0, list[Sequence[Weighed]](), 0
    for segment, own in zip(chain, options, strict=True):
        more_s = sum(count_host(problem, run, replay)[0] for run in segment.runs)
        can_follow = followed_s + more_s <= spare[min(segment.runs[-1].stop, len(spare) - 1)]
        followed_s, count = followed_s + more_s * can_follow, count + can_follow
        found.append(own if can_follow else [one for one in own if one.option.way in _LITTLE_FOLLOWING])
    return found if 0 < count < len(chain) else None


def _list_sending(
    problem: Problem, chain: Sequence[Segment], options: Sequence[list[Weighed]], plain: Rehearsal
) -> Iterator[tuple[list[list[Weighed]], int]]:
    """Options with which segments that replay send some of what they keep, beside those that send nothing; how much.

    Each sends as much as the link, at a share of its speed, has had time for and those before it have left. So the
    choice for one segment need not know of the others.
    """
    speed, first = problem.link_bytes_per_s or 0.0, {segment.type: segment for segment in reversed(chain)}
    begin = chain[0].runs[0].first
    for share in _LINK_SHARES if speed else ():
        sent_bytes, mixed = 0, []
        for segment, own in zip(chain, options, strict=True):
            usual = first[segment.type]
            passed_s = sum(problem.seconds[begin : segment.runs[-1].stop])
            most = (int(share * passed_s * speed) - sent_bytes) // len(segment.runs)
            sending = [weigh(problem, usual, one, plain) for one in _send_kept(problem, usual, most)]
            sent_bytes += max((_count_sent(problem, usual, one.option) for one in sending), default=0)
            moved = (move(one, problem, plain, usual, segment) for one in sending)
            mixed.append(without_worse([*_keep_here(own), *moved]))
        if sent_bytes:
            yield mixed, sent_bytes


def _count_sent(problem: Problem, segment: Segment, option: Option) -> int:
    treated = option.treat(problem, segment)
    return sum(problem.sizes[storage] for _, treatment in treated for storage in treatment.sent)


def _join(
    problem: Problem, chain: Sequence[Segment], options: Sequence[Sequence[Weighed]], row: int
) -> Sequence[Sequence[Weighed]]:
    """The options, and the same joined to the segment before, in rows of so many: what a row has is made at once."""
    found, length, together = [options[0]], 0, 0
    for (before, segment), own in zip(itertools.pairwise(chain), options[1:], strict=True):
        giver, taker = before.runs[0], segment.runs[0]
        storages = find_joinable(problem, giver, taker) if len(before.runs) == len(segment.runs) == 1 else ()
        length = (length + 1) % row if storages else 0
        if not length:
            together = 0
            found.append(own)
            continue
        freed = sum(problem.sizes[storage] for storage in storages)
        stop = max(giver.makes[storage][-1] + 1 for storage in storages)
        again_s = sum(problem.prices.again_s(call) for call in range(giver.last_needed, stop))
        together += sum(problem.sizes[storage] for storage in giver.needs if problem.is_evictable(storage, giver))
        joined = [
            replace(
                one,
                option=replace(one.option, is_joined=True),
                freed_bytes=one.freed_bytes + freed,
                backward_bytes=one.backward_bytes + together,
                again_s=one.again_s + again_s,
            )
            for one in own
            if one.option.way in _RUNS_AGAIN and not one.option.sends
        ]
        found.append([*own, *joined])
    return found


def _take_apart(parts: dict[str, Segment], segment: Segment, option: Option) -> list[tuple[Segment, Option]]:
    """An option for the modules inside of a segment as options for these."""
    if not option.parts:
        return [(segment, option)]
    return [(parts[f"{segment.path}.{name}"], own) for name, own in option.parts]


def _keep_here(options: Sequence[Weighed]) -> list[Weighed]:
    """Those that send nothing: where whole modules go, the link is full."""
    return [weighed for weighed in options if not weighed.option.sends]


def weigh_chain(
    problem: Problem, chain: Sequence[Segment], plain: Rehearsal, *, holds_casts: bool = False
) -> list[list[Weighed]]:
    """The options of each segment that are worth looking at; those of one type are found once.

    Args:
        problem: the step.
        chain: the segments.
        plain: what is beside them.
        holds_casts: whether to look at options that hold casts of weights, too, and at what all free for backward.
    """
    by_type: dict[int, tuple[Segment, list[Weighed]]] = {}
    _find_together(problem, chain)
    for segment in chain:
        if segment.type not in by_type:
            run = segment.runs[0]
            able = [one for one in find_options(problem, segment) if holds_casts or not one.keeps_casts(problem, run)]
            found = [weigh(problem, segment, option, plain) for option in able]
            if not can_replay(problem, run) and not holds_casts:
                found += [weigh(problem, segment, one, plain) for one in _combine_parts(problem, segment, plain)]
            if holds_casts:
                found = [replace(one, freed_bytes=one.freed_bytes + one.cached_bytes, cached_bytes=0) for one in found]
            by_type[segment.type] = (segment, without_worse(found))
    return [
        [move(one, problem, plain, by_type[segment.type][0], segment) for one in by_type[segment.type][1]]
        for segment in chain
    ]


def _find_together(problem: Problem, segments: Sequence[Segment]) -> None:
    """Find the options of all types at once: the solver lets other threads run."""
    types = {segment.type: segment for segment in reversed(segments)}  # the first of each
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        list(threads.map(functools.partial(find_options, problem), types.values()))


def _combine_parts(problem: Problem, segment: Segment, plain: Rehearsal) -> Iterator[Option]:
    """Options for the modules inside of a segment, each the best if a byte that is freed is worth so much time."""
    known: dict[int, list[Weighed]] = {}
    parts = find_parts(problem, segment)
    _find_together(problem, parts)
    for part in parts:
        if part.type not in known:
            known[part.type] = [weigh(problem, part, option, plain) for option in find_options(problem, part)]
    prices = sorted(
        weighed.again_s / weighed.freed_bytes for own in known.values() for weighed in own if weighed.freed_bytes > 0
    )
    groups = group_alike(problem, segment, parts)
    for price in prices[:: max(1, len(prices) // _MOST_PRICES)]:
        best = (
            (part, option)
            for group in groups
            for option in [_find_best([known[part.type] for part in group], price)]
            for part in group
        )
        names = [(part.path.removeprefix(f"{segment.path}."), option) for part, option in best if option.acts]
        if names:
            yield Option(parts=tuple(names))


def group_alike(problem: Problem, segment: Segment, parts: Sequence[Segment]) -> list[list[Segment]]:
    """Parts of a segment that must be treated the same: experts, if what it chooses says how large each of them is.

    How large one is differs from step to step, all together stay the same.
    """
    groups: dict[str, list[Segment]] = {}
    is_cut = cuts_by_choice(problem, segment.runs[0])
    for part in parts:
        groups.setdefault(name_alike(part.path) if is_cut else part.path, []).append(part)
    is_uneven = {name: len({part.type for part in group}) > 1 for name, group in groups.items()}
    together = [group for name, group in groups.items() if is_uneven[name]]
    return [*together, *([part] for name, group in groups.items() if not is_uneven[name] for part in group)]


def _find_best(choices: Sequence[Sequence[Weighed]], price: float) -> Option:
    """Of the options that all parts of a group have, the best for all of them if a byte is worth so much time."""
    costs: dict[Option, list[float]] = {}
    for own in choices:
        for one in own:
            costs.setdefault(one.option, []).append(one.again_s - price * one.freed_bytes * _MORE)
    return min((option for option in costs if len(costs[option]) == len(choices)), key=lambda one: sum(costs[one]))


def find_options(problem: Problem, segment: Segment) -> list[Option]:
    """What can be done with a segment: nothing, running it again, keeping some of it; found once for each type."""
    known: dict[tuple[int, bool], list[Option]] = problem.derived.setdefault("options", {})
    key = (segment.type, problem.prices.pace.counts_backward)  # that is what the prices of calls depend on
    if key not in known:
        known[key] = _search_options(problem, segment.runs[0])
    if not problem.link_bytes_per_s:
        return known[key]
    again = [option for option in known[key] if option.acts]
    return [*known[key], *_send_held(problem, segment.runs[0], again)]


def _search_options(problem: Problem, run: Run) -> list[Option]:
    found = [PLAIN, Option(way=PlannedWay.RERUN)]
    if can_replay(problem, run):
        found += find_keep_sets(problem, run)
        found += find_waist_sets(problem, run)
    found += find_served_sets(problem, run)
    return list(dict.fromkeys(found))


def _send_held(problem: Problem, run: Run, served: Iterable[Option]) -> Iterator[Option]:
    """Options that run again and send what they hold until then, as far as the link carries it beside the run."""
    most = _MOST_LINK_TIME * sum(problem.seconds[run.first : run.stop]) * (problem.link_bytes_per_s or 0.0)
    for option in served:
        way = PlannedWay.SERVE if option.kept else PlannedWay.RERUN
        held = find_held(problem, run, Treatment(way=way, kept=option.storages(problem, run)))
        if 0 < sum(problem.sizes[storage] for storage in held) <= most:
            yield replace(option, way=way, is_away=True)


def _send_kept(problem: Problem, segment: Segment, most_bytes: int) -> Iterator[Option]:
    """Options that replay and send some of what they keep, nearly so many bytes of each run."""
    run = segment.runs[0]
    if not all(problem.are_same(run, other) for other in segment.runs):
        return
    for option in find_options(problem, segment):
        if option.way is PlannedWay.REPLAY:
            sent = _fill(problem, _list_sendable(problem, run, option), most_bytes)
            if sent:
                yield replace(option, sent=frozenset(place_of(problem, run, storage) for storage in sent))


def _list_sendable(problem: Problem, run: Run, option: Option) -> list[int]:
    """What a replay can send of what it keeps and will ask for; large ones first; found once."""
    known: dict[tuple[int, Option], list[int]] = problem.derived.setdefault("sendable", {})
    key = (run.first, option)
    if key not in known:
        (treatment,) = option.treat_run(problem, run)
        again = find_recomputed(problem, run, treatment)
        asked = run.needs.union(storage for _, calls in again for call in calls for storage in problem.reads[call])
        able = find_sendable(problem, run, treatment.kept & asked)
        known[key] = sorted(able, key=problem.sizes.__getitem__, reverse=True)
    return known[key]


def _fill(problem: Problem, storages: Sequence[int], most_bytes: int) -> tuple[int, ...]:
    """Those of the first few storages that together come nearest to so many bytes and take no more."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for storage in storages[:_MOST_SENT]:
        for size, some in list(found.items()):
            more = size + problem.sizes[storage]
            if more <= most_bytes:
                found.setdefault(more, (*some, storage))
    return found[max(found)]
