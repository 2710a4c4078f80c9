"""One cell of the benchmarks, measured in a process of its own: one model, size and mode, contenders taking turns.

Contenders are models of their own that share parameters, buffers and the optimizer, so that they can take turns without
being undone. A step is forward, backward and the optimizer's. Before anything is timed each has run until nothing more
is learned or compiled, and its gradients were compared with those of the plain step. Peaks are the allocator's, over
everything; on the CPU live bytes, in a step that is not timed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import torch

from recollect._bench.ahead import MOST_COMPILATIONS, Ahead, Entrants
from recollect._bench.alternate import Step, alternate
from recollect._bench.arena import Arena, Ready
from recollect._bench.cases import SCALES, Scale
from recollect._bench.children import end_with_parent
from recollect._bench.contenders import OURS, PLAIN, Contender, list_contenders
from recollect._bench.failures import explain
from recollect._bench.ours import HOST_SHARES, QUICK_SHARES, SHARES, list_plans
from recollect._bench.reach import list_searches
from recollect._bench.results import Cell, Figure, Measured, Reach, Results
from recollect._core.profiles import Profile
from recollect._core.torch_private.recompiles import allow_compilations
from recollect._inspect.oom.error import read_shortage

_TOO_LATE = "the time was up"
_SLOW = 6.0  # times the plain step: one step is enough to know


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        cell: which.
        device: as torch writes it.
        rounds: how often all take a turn.
        repeats: steps of a turn.
        is_quick: whether a look is enough.
        jobs: processes that compile contenders ahead, into the cache that this one reads; 0 for none.
        budget_bytes: within which the largest is looked for.
        known: contenders whose largest is known already.
        limit_s: after how long no other contender begins; None for no limit.
    """

    cell: Cell
    device: str
    rounds: int
    repeats: int
    is_quick: bool = False
    jobs: int = 0
    budget_bytes: int = 0
    known: tuple[str, ...] = ()
    limit_s: float | None = None

    def find_end(self) -> float:
        """When nothing more may begin, by the clock of `time.monotonic`."""
        return math.inf if self.limit_s is None else time.monotonic() + self.limit_s


def measure(request: Request) -> Measured:
    """Measure one cell."""
    scale = SCALES[torch.device(request.device).type, request.cell.model, request.cell.size]
    shape = f"{scale.text}, batch {scale.batch}, {'length' if 'length' in scale.grows else 'side'} {scale.length}"
    common = Measured(cell=request.cell, shape=shape, is_quick=request.is_quick)
    if request.cell.mode.startswith("largest "):
        return _measure_largest(request, scale, common)
    end = request.find_end()
    arena = Arena(scale.case(), request.device)
    seen = arena.take_profile()
    with Ahead(jobs=request.jobs, end=end) as ahead, allow_compilations(MOST_COMPILATIONS):
        contenders = _list_all(arena, seen, request, ahead)
        is_compiled = request.cell.mode == "compiled"
        prepared = _prepare_all(arena, contenders, ahead, end, is_compiled=is_compiled)
    figures = _time_all(arena, prepared, request)
    return replace(
        common,
        held_bytes=seen.timeline.held_bytes,
        figures=tuple(figures),
        is_partial=any(one.failed == _TOO_LATE for one in figures),
    )


def _list_all(arena: Arena, seen: Profile, request: Request, ahead: Ahead) -> list[Contender]:
    """Everyone who takes part; compiled, those who are waited for, rivals first: ours needs the plain step's peak."""
    shares = QUICK_SHARES if request.is_quick else SHARES
    if request.cell.mode == "compiled":
        cell = request.cell
        entrants = Entrants(model=cell.model, size=cell.size, device=request.device, shares=shares)
        ahead.begin(entrants, [one.name for one in entrants.list_contenders(arena) if one.name != PLAIN])
        entrants = replace(entrants, span_bytes=_find_span(arena, seen))
        found = entrants.list_contenders(arena)
        ahead.begin(entrants, [one.name for one in found if one.name != PLAIN])
        return found
    ours = list_plans(seen, shares)
    if arena.device.type != "cpu":
        ours += list_plans(seen, HOST_SHARES, tiers="host")
    return list_contenders(ours, arena.device, is_compiled=False)


def _find_span(arena: Arena, seen: Profile) -> int:
    """What the plain step takes when compiled, beyond what is there before it; on the CPU, when not compiled."""
    if arena.device.type == "cpu":
        return seen.peak_bytes - seen.timeline.held_bytes
    plain = arena.prepare(Contender(name=PLAIN), is_compiled=True)
    held = torch.accelerator.memory_allocated(arena.device)
    torch.accelerator.reset_peak_memory_stats(arena.device)
    plain.step()
    return torch.accelerator.max_memory_allocated(arena.device) - held


def _measure_largest(request: Request, scale: Scale, common: Measured) -> Measured:
    unknown = request.cell.mode.removeprefix("largest ")
    end = request.find_end()
    found: list[Reach] = []
    is_partial = False
    for contender, search in list_searches(scale, unknown, request.device, request.budget_bytes):
        if contender in request.known:
            continue
        if found and time.monotonic() > end:
            is_partial = True
            break
        found.append(search())
    return replace(common, budget_bytes=request.budget_bytes, reaches=tuple(found), is_partial=is_partial)


@dataclass(slots=True, kw_only=True)
class _Prepared:
    """Who takes part.

    Attributes:
        figures: of each, by name, in the order of tables.
        steps: of those who could be prepared.
        slow: of those who take so long that one step tells enough.
    """

    figures: dict[str, Figure]
    steps: dict[str, Step] = field(default_factory=dict)
    slow: dict[str, Step] = field(default_factory=dict)


def _prepare_all(
    arena: Arena, contenders: list[Contender], ahead: Ahead, end: float, *, is_compiled: bool
) -> _Prepared:
    """Make them ready, ours and others in turn: if the time is up, some of each are there to be compared."""
    prepared = _Prepared(figures={one.name: _start_figure(one) for one in contenders})
    waiting = {one.name: one for one in _take_turns(contenders) if not one.absent}
    plain: Ready | None = None
    while waiting:
        one = waiting.pop(ahead.wait_for_one(list(waiting)))
        figure, refusal = prepared.figures[one.name], ahead.find_refusal(one.name)
        if refusal or (plain is not None and time.monotonic() > end):
            prepared.figures[one.name] = replace(figure, failed=refusal or _TOO_LATE)
            continue
        try:
            ready = _prepare(arena, one, ahead, is_compiled=is_compiled)
        except Exception as error:  # out of memory, or whatever a rival raises
            prepared.figures[one.name] = replace(figure, failed=explain(error))
            arena.give_up()
            continue
        plain = plain or ready
        pairs = zip(ready.norms, plain.norms, strict=True)
        difference = max(abs(own - theirs) / max(abs(theirs), 1e-12) for own, theirs in pairs)
        prepared.figures[one.name] = replace(figure, gradient_difference=difference)
        (prepared.slow if ready.step_s > _SLOW * plain.step_s else prepared.steps)[one.name] = ready.step
    return prepared


def _take_turns(contenders: list[Contender]) -> Iterator[Contender]:
    """The plain step, then one of ours and one of the others, until there are no more of either.

    >>> ours = [Contender(name=f"ours {share}", family="recollect") for share in (90, 50, 30)]
    >>> [one.name for one in _take_turns([Contender(name="plain"), *ours, Contender(name="full")])]
    ['plain', 'ours 90', 'full', 'ours 50', 'ours 30']
    """
    yield from (one for one in contenders if one.name == PLAIN)
    ours = [one for one in contenders if one.family == OURS]
    others = [one for one in contenders if one.family != OURS and one.name != PLAIN]
    for pair in zip_longest(ours, others):
        yield from filter(None, pair)


def _prepare(arena: Arena, one: Contender, ahead: Ahead, *, is_compiled: bool) -> Ready:
    try:
        return arena.prepare(one, is_compiled=is_compiled)
    except Exception as error:
        if read_shortage(error) is None or not ahead.is_busy:
            raise
    arena.give_up()
    ahead.wait()  # what compiles has taken the memory
    return arena.prepare(one, is_compiled=is_compiled)


def _time_all(arena: Arena, prepared: _Prepared, request: Request) -> list[Figure]:
    figures, steps, slow = prepared.figures, prepared.steps, prepared.slow
    clock = time.process_time if arena.device.type == "cpu" else time.perf_counter
    timings = alternate(steps, device=arena.device, rounds=request.rounds, repeats=request.repeats, clock=clock)
    for name, step in slow.items():
        timings |= alternate({name: step}, device=arena.device, rounds=1, repeats=1, clock=clock)
    for name, timing in timings.items():
        peak = timing.peak_bytes
        if arena.device.type == "cpu" and request.cell.mode != "compiled":  # what compiled code makes is not seen
            peak = arena.meter({**steps, **slow}[name])
        figures[name] = replace(figures[name], rounds_s=timing.rounds_s, peak_bytes=peak)
    return list(figures.values())


def _start_figure(one: Contender) -> Figure:
    forecast = None if one.plan is None else one.plan.forecast
    return Figure(
        contender=one.name,
        family=one.family,
        failed=one.absent,
        budget_bytes=None if forecast is None else forecast.budget_bytes,
        predicted_peak_bytes=None if forecast is None else forecast.peak_bytes,
        predicted_step_s=None if forecast is None else forecast.step_s,
    )


def main(arguments: list[str]) -> None:
    """Measure what a request, as JSON, asks for, and write it to a file."""
    end_with_parent()
    asked, out = arguments
    said = json.loads(asked)
    request = Request(**{**said, "cell": Cell(**said["cell"]), "known": tuple(said.get("known", ()))})
    if torch.device(request.device).type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: a second thread mostly waits
    Path(out).write_text(Results(measured=(measure(request),)).to_json(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
