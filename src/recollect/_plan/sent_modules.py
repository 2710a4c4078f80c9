"""Which whole modules to send away: what all of them save, as much as a link carries beside forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recollect._core.timetables import IN_FLIGHT_BYTES
from recollect._plan.options import Option
from recollect._plan.problem import Problem
from recollect._plan.segments import Segment, find_last_modules
from recollect._plan.treatments import PlannedWay, find_sent

_BACKLOGS_BYTES = (IN_FLIGHT_BYTES, 4 * IN_FLIGHT_BYTES)
_MARKER_BYTES = IN_FLIGHT_BYTES // 4
_SENT_SHARES = (0.34, 0.67, 1.0)

Extra = tuple[tuple[Segment, Option], ...]
"""Modules beside a chain, and what becomes of them."""


def choose_sent(problem: Problem, chain: Sequence[Segment]) -> Iterator[tuple[frozenset[int], Extra]]:
    """Which segments to send away: as many as the link carries beside forward, evenly spread, the first ones first.

    The most that it carries is tried with a marker, too.
    """
    speed = problem.link_bytes_per_s
    if not speed:
        return
    known: set[frozenset[int]] = set()
    for limit in _BACKLOGS_BYTES:
        backlog, sent = 0.0, list[int]()
        for at, segment in enumerate(chain[:-1]):
            size = sum(problem.sizes[storage] for storage in find_sent(problem, segment.runs))
            if size and (not backlog or backlog + size <= limit):
                sent.append(at)
                backlog += size
            passed = sum(problem.seconds[segment.runs[0].first : segment.runs[-1].stop])
            backlog = max(0.0, backlog - passed * speed)
        for share in _SENT_SHARES:
            some = frozenset(sent[: max(1, round(len(sent) * share))])
            if some and some not in known:
                known.add(some)
                yield some, ()
        if sent and (marker := _find_marker(problem, chain)) is not None:
            inside = [at for at, segment in enumerate(chain) if segment.path == marker.path]
            yield frozenset((*sent, *inside)), () if inside else ((marker, Option(way=PlannedWay.OFFLOAD)),)


def _find_marker(problem: Problem, chain: Sequence[Segment]) -> Segment | None:
    """The last module that saves little, after all blocks: when backward asks for that, ways back can begin.

    Without it they begin with the first use of what was sent, which is then not back in time, and so is not sent.
    """
    for segment in find_last_modules(problem, chain):
        size = sum(problem.sizes[storage] for storage in find_sent(problem, segment.runs))
        if 0 < size <= _MARKER_BYTES:
            return segment
    return None
