"""What the entries of policies did in a model, as rows for profiles."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from recollect._core.decisions import Decision
from recollect._core.profiles import RuleEntry
from recollect._inspect.explain import regions_of
from recollect._report.explained import ExplainedRegion


def describe_rules(modules: Sequence[nn.Module]) -> tuple[RuleEntry, ...]:
    """One row for each entry of a policy and what became of its values; regions under the same policy together."""
    rows: dict[tuple[str, str, Decision], list[tuple[str, int, int]]] = {}
    for module in modules:
        for region in regions_of(module):
            for (rule, decision), (values, size) in _count(region).items():
                rows.setdefault((region.policy, rule, decision), []).append((region.name, values, size))
    return tuple(
        RuleEntry(
            region=found[0][0],
            rule=rule,
            decision=decision,
            regions=len(found),
            values=sum(values for _, values, _ in found),
            bytes=sum(size for _, _, size in found),
        )
        for (_, rule, decision), found in rows.items()
    )


def _count(region: ExplainedRegion) -> dict[tuple[str, Decision], tuple[int, int]]:
    counts: dict[tuple[str, Decision], tuple[int, int]] = {}
    for site in region.calls[0].sites if region.calls else ():
        values, size = counts.get((site.by, site.decision), (0, 0))
        counts[site.by, site.decision] = (values + len(site.shapes), size + site.bytes)
    return counts
