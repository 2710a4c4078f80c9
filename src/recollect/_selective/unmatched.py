"""How often the rules of a policy matched, and a warning about those that did not in a whole step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from weakref import ref

from recollect._core.operators import operator_of
from recollect._core.patterns import quote_all
from recollect._core.units import format_bytes, list_some
from recollect._policy.base import Policy
from recollect._policy.combine import Combination
from recollect._policy.places import SaveModules, SaveNames
from recollect._policy.rules import SaveLargerThan
from recollect._selective.decisions import DecisionLine, Decisions
from recollect._selective.knowledge import all_knowledge

_decided: dict[int, ref[Policy]] = {}  # by id: hashing a policy of many parts takes microseconds


def count_matches(decisions: Decisions, line: DecisionLine) -> int:
    """How often the decision of an operator's line was carried out."""
    return line.matched + decisions.unwatched


def warn_unmatched(policy: Policy) -> None:
    """Warn about each rule of a policy that matched nothing so far, in any region; once for each policy.

    To be called when a step's forwards are over, with the policy as the user gave it. The first call decides; others
    are a look into a table. A rule does not count as unmatched if an earlier one had decided all that it matches, nor
    does `save_modules`, which is refused at once where it matches nothing.
    """
    if id(policy) in _decided:
        return
    is_new = all(other() != policy for other in list(_decided.values()))
    key = id(policy)
    _decided[key] = ref(policy, lambda _: _decided.pop(key, None))
    if is_new and policy.labels:
        for message in _describe_unmatched(policy):
            warnings.warn(message, UserWarning, stacklevel=2)


def _describe_unmatched(policy: Policy) -> Iterator[str]:
    """What to say of each rule that matched nothing."""
    knowledge = [one for one in all_knowledge() if one.given == policy]
    by_kind = [decisions for one in knowledge for decisions in one.all_decisions()]
    matched = {rule for decisions in by_kind for rule in _matched_in(decisions)}
    reached = {label for one in knowledge for label in one.policy.labels}
    for label, rule in {repr(rule): rule for rule in _rules_of(policy)}.items():
        if label in matched or isinstance(rule, SaveModules):
            continue
        if label not in reached:
            regions = quote_all(dict.fromkeys(one.region for one in knowledge))
            yield f"policy {label} matched no region in this step. Regions that ran: {regions}"
        elif not _is_outrun(rule, by_kind):
            yield f"policy {label} matched nothing in this step. {_describe_choice(rule, by_kind)}"


def _matched_in(decisions: Decisions) -> Iterator[str]:
    """The rules that decided something, in words."""
    for line in (*decisions.lines, *decisions.blocks.values()):
        yield line.by
    # A named value may have no line of its own: a kept block made it, or another rule keeps it.
    for by in list(decisions.names.values()):
        if by is not None:
            yield by


def _rules_of(policy: Policy) -> Iterator[Policy]:
    """The policies that it is made of, each with a rule of its own."""
    if isinstance(policy, Combination):
        for part in policy.parts():
            yield from _rules_of(part)
    elif policy.labels:
        yield policy


def _is_outrun(rule: Policy, by_kind: Iterable[Decisions]) -> bool:
    """Whether it matches some sites about which earlier rules decided."""
    return any(rule.judge(site) is not None for decisions in by_kind for line in decisions.lines for site in line.sites)


def _describe_choice(rule: Policy, by_kind: list[Decisions]) -> str:
    """What the rule could have matched."""
    if isinstance(rule, SaveNames):
        names = dict.fromkeys(name for decisions in by_kind for name in list(decisions.names))
        if not names:
            return "Nothing there has a name; give names with recollect.region and recollect.name"
        return f"Names given there: {list_some([repr(name) for name in names])}"
    lines = [
        (decisions, line) for decisions in by_kind for line in decisions.lines if operator_of(line.key).can_be_kept
    ]
    if isinstance(rule, SaveLargerThan) and lines:
        sites = [site for _, line in lines for site in line.sites]
        largest = max(sites, key=lambda site: site.bytes)
        return f"The largest value there: {format_bytes(largest.bytes)}, of {largest.op}"
    times: Counter[str] = Counter()
    for decisions, line in lines:
        times[line.what] += count_matches(decisions, line)
    ran = [f"{what} ({count} time{'' if count == 1 else 's'})" for what, count in times.most_common()]
    text = f"Operators that ran there: {list_some(ran) or 'none'}"
    blocks = dict.fromkeys(line.what for decisions in by_kind for line in decisions.blocks.values())
    if blocks:
        text += f"; those inside {list_some(list(blocks))}, kept whole, were not considered"
    return text
