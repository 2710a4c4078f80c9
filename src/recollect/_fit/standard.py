"""What the standard policies would do with a step, as candidates for the planner: no plan is to be worse than these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from recollect._apply.rules import parse_value
from recollect._core.decisions import Decision
from recollect._plan.options import PLAIN, Option
from recollect._plan.problem import Problem
from recollect._plan.segments import Segment
from recollect._plan.solvers.keep_sets import keep_calls
from recollect._plan.treatments import PlannedWay
from recollect._plan.ways import can_be_kept
from recollect._policy.base import Policy
from recollect._policy.combine import first_match
from recollect._policy.judging import judge
from recollect._policy.presets import ReadyMade
from recollect._policy.rules import save_attention, save_matmuls

FULL = "full"
Candidate = tuple[str, list[tuple[Segment, Option]]]


def list_standard(problem: Problem, chain: Sequence[Segment]) -> Iterator[Candidate]:
    """The standard choices along a chain of segments, each with its name."""
    blocks = _find_repeated(chain)
    full = Option(way=PlannedWay.RERUN)
    yield FULL, [(segment, full) for segment in blocks]
    yield "full, last block plain", [(segment, full) for segment in blocks[:-1]]
    yield "every:2", [(segment, full if number % 2 == 0 else PLAIN) for number, segment in enumerate(blocks)]
    selective, _ = parse_value("selective")
    assert selective is not None
    assert selective.policy is not None
    for name, policy in (
        ("selective", selective.policy),
        ("matrix products and attention kept", first_match(save_matmuls, save_attention)),
        ("attention kept", save_attention),
    ):
        known: dict[int, Option] = {}
        for segment in blocks:
            if segment.type not in known:
                known[segment.type] = evaluate(problem, segment, policy)
        yield name, [(segment, known[segment.type]) for segment in blocks]


def evaluate(problem: Problem, segment: Segment, policy: Policy) -> Option:
    """What a policy would keep of a segment."""
    run = segment.runs[0]
    sites = list(problem.sites(run))
    if isinstance(policy, ReadyMade):
        policy = policy.suited(site.op for _, _, site in sites)
    kept = {
        number
        for number, _, site in sites
        if can_be_kept(problem, run, number) and judge(policy, site).decision is Decision.SAVE
    }
    return keep_calls(problem, run, kept)


def _find_repeated(chain: Sequence[Segment]) -> list[Segment]:
    """The segments of every kind that a list holds several of; without lists those of the kind that runs most often."""
    listed = Counter(segment.kind for segment in chain if segment.path.rpartition(".")[2].isdecimal())
    counts = Counter(segment.kind for segment in chain for _ in segment.runs)
    kinds = {kind for kind, count in listed.items() if count > 1} or {max(counts, key=lambda kind: counts[kind])}
    return [segment for segment in chain if segment.kind in kinds]
