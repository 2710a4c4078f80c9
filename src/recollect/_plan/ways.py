"""How the executor will get a run's values back under a policy that keeps single results.

Replay makes single calls again and is cheap; where it cannot be trusted the module runs again and kept results are
served. What cannot be replayed is decided by `recollect._selective`; this is what a profile shows of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from recollect._core.calls import OpCall
from recollect._plan.problem import Problem, Run
from recollect._plan.rehearse import Way

_PART_OF_ATTENTION = "_safe_softmax"  # only attention that has no kernel of its own calls it


def find_way(problem: Problem, run: Run) -> Way:
    """Replay, or serve where the run writes in place, into buffers, chooses a route, or talks to other processes."""
    for number in range(run.first, run.stop):
        call = problem.calls[number]
        if call.is_routing or call.is_collective or call.runs_once:
            return Way.SERVE
        for storage in call.writes:
            maker = run.makes.get(storage, (None,))[0]
            if maker is None or not _is_inside(problem, maker, number):
                return Way.SERVE
    return Way.REPLAY


def find_groups(problem: Problem, run: Run) -> Iterator[list[int]]:
    """Calls that one call of torch makes, as far as can be told: parts of a norm, or of attention, without a kernel.

    They are kept together or not at all: replay makes whole calls of torch again.
    """
    for _, group in itertools.groupby(range(run.first, run.stop), key=lambda at: _place(problem.calls[at])):
        numbers = list(group)
        calls = [problem.calls[at] for at in numbers]
        is_layer = calls[0].module in problem.leaves and not any(call.flops for call in calls)
        if is_layer or any(_PART_OF_ATTENTION in call.op for call in calls):
            yield numbers


def _place(call: OpCall) -> tuple[str, str]:
    return call.module, call.source


def _is_inside(problem: Problem, maker: int, writer: int) -> bool:
    """Whether what a call makes is written into before anyone else has it: by a part of the same call of torch."""
    return _place(problem.calls[maker]) == _place(problem.calls[writer])
