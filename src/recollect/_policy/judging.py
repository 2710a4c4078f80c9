"""What becomes of a value in the end: the policy's answer, or where it has none, what holds for all regions."""

from __future__ import annotations

from recollect._core.decisions import Decision, Site
from recollect._policy.base import Policy, Verdict

BY_DEFAULT = "by default"
_NO_RULE = "no rule"


def judge(policy: Policy | None, site: Site) -> Verdict:
    """Ask a policy about a site; without one, nothing but the defaults holds.

    Routing results and what came from other processes are kept, unless the policy is strict: a choice that comes out
    otherwise, or a message that only some of the processes send, would be worse than the memory.

    >>> judge(None, Site(region="block", op="aten.topk.default", is_routing=True))
    Verdict(decision=<Decision.SAVE: 'save'>, by='by default: routing results')
    >>> judge(None, Site(region="block", op="aten.sin.default"))
    Verdict(decision=<Decision.RECOMPUTE: 'recompute'>, by='no rule')
    """
    verdict = None if policy is None else policy.judge(site)
    if (
        (verdict is None or verdict.decision is Decision.RECOMPUTE)
        and (policy is None or policy.keeps_defaults)
        and (site.is_routing or site.is_collective)
    ):
        what = "routing results" if site.is_routing else "collectives"
        return Verdict(Decision.SAVE, f"{BY_DEFAULT}: {what}")
    return Verdict(Decision.RECOMPUTE, _NO_RULE) if verdict is None else verdict
