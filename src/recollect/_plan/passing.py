"""Where forward passes without sending anything, so that memory of what has left is let go.

These are the ends of regions that send nothing, and of modules beside those that do: the other blocks of their list.
`recollect.apply` has the executor look there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recollect._plan.problem import Problem, Run


def find_passes(problem: Problem, regions: Sequence[tuple[Run, bool]]) -> Iterator[int]:
    """The calls after which that is.

    Args:
        problem: the step.
        regions: the runs that are treated, each with whether it sends something.
    """
    known = {"", *(run.path for run, _ in regions)}
    beside = {run.path.rpartition(".")[0] for run, sends in regions if sends}
    yield from (run.stop - 1 for run, sends in regions if not sends)
    for path in problem.paths:
        if path not in known and path.rpartition(".")[0] in beside:
            yield from (run.stop - 1 for run in problem.runs_of(path))
