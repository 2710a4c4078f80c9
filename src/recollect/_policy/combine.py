"""Policies made of policies: what they tell the engine follows from their parts, verdicts name the part at work."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recollect._core.argument_text import describe_argument
from recollect._core.decisions import Decision, Site
from recollect._core.patterns import compile_pattern
from recollect._policy.base import DecisionPolicy, Policy, PolicyLike, Verdict, as_policy
from recollect._policy.rules import SaveNothing


class Combination(Policy):
    """A policy with parts."""

    @abstractmethod
    def parts(self) -> tuple[Policy, ...]:
        """The policies it is made of, in the order in which they are asked."""

    @property
    def sees_names(self) -> bool:
        """Whether one of them does."""
        return any(part.sees_names for part in self.parts())

    @property
    def keeps_defaults(self) -> bool:
        """Unless one part is strict."""
        return all(part.keeps_defaults for part in self.parts())

    @property
    def labels(self) -> tuple[str, ...]:
        """Those of all parts, each once."""
        return tuple(dict.fromkeys(label for part in self.parts() for label in part.labels))

    @property
    def functions(self) -> tuple[type, ...]:
        """Those of all parts, each once."""
        return tuple(dict.fromkeys(function for part in self.parts() for function in part.functions))

    @property
    def answers_all(self) -> bool:
        """If one part does."""
        return any(part.answers_all for part in self.parts())

    def judge(self, site: Site) -> Verdict | None:
        """What the first part says that has something to say."""
        for part in self.parts():
            verdict = part.judge(site)
            if verdict is not None:
                return verdict
        return None

    def keeps_module(self, path: str, module: Any) -> str | None:
        """The words of the first part that keeps it."""
        return next(filter(None, (part.keeps_module(path, module) for part in self.parts())), None)

    def keeps_name(self, name: str) -> str | None:
        """The words of the first part that keeps it."""
        return next(filter(None, (part.keeps_name(name) for part in self.parts())), None)

    def check_modules(self, paths: dict[str, Any]) -> None:
        """Check all parts.

        Raises:
            ValueError: a pattern of one matches nothing.
        """
        for part in self.parts():
            part.check_modules(paths)


@dataclass(frozen=True, slots=True, repr=False)
class FirstMatch(Combination):
    """Asks one policy after another; the first that decides wins."""

    policies: tuple[Policy, ...]

    def parts(self) -> tuple[Policy, ...]:
        """In order."""
        return self.policies

    def within(self, region: str) -> Policy:
        """Each part as it stands there, up to one that answers for everything there."""
        reached: list[Policy] = []
        for policy in self.policies:
            reached.append(policy.within(region))
            if reached[-1].answers_all:
                break
        return FirstMatch(tuple(reached))

    def __repr__(self) -> str:
        return f"first_match({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True, slots=True, repr=False)
class Otherwise(Combination):
    """Decides about every site: as its policy says, or else by recomputing."""

    policy: Policy

    @property
    def answers_all(self) -> bool:
        """That is what it is for."""
        return True

    def parts(self) -> tuple[Policy, ...]:
        """The one policy."""
        return (self.policy,)

    def judge(self, site: Site) -> Verdict:
        """The policy's verdict, or recompute."""
        if isinstance(self.policy, DecisionPolicy):
            return Verdict(self.policy.decision, by=repr(self))
        return self.policy.judge(site) or Verdict(Decision.RECOMPUTE, by=repr(self))

    def within(self, region: str) -> Policy:
        """With the policy as it stands there."""
        return Otherwise(self.policy.within(region))

    def __repr__(self) -> str:
        return f"otherwise({self.policy})"


@dataclass(frozen=True, slots=True, repr=False)
class PerRegion(Combination):
    """Has a policy for each kind of region; `within` picks one, before which no module or name is kept."""

    entries: tuple[tuple[str, Policy], ...]

    @property
    def answers_all(self) -> bool:
        """Regions may be left that no entry is for."""
        return False

    def parts(self) -> tuple[Policy, ...]:
        """The policies of all regions."""
        return tuple(policy for _, policy in self.entries)

    def judge(self, site: Site) -> Verdict | None:
        """As the site's region has it."""
        return self.within(site.region).judge(site)

    def keeps_module(self, path: str, module: Any) -> str | None:
        """Not before the region is known."""
        del path, module
        return None

    def keeps_name(self, name: str) -> str | None:
        """Not before the region is known."""
        del name
        return None

    def check_modules(self, paths: dict[str, Any]) -> None:
        """Not before the region is known: other regions have other modules."""
        del paths

    def within(self, region: str) -> Policy:
        """The policy of the first entry that matches; one that says nothing if none does."""
        for pattern, policy in self.entries:
            if compile_pattern(pattern)(region):
                return policy.within(region)
        return SaveNothing()

    def __repr__(self) -> str:
        return f"per_region({{{', '.join(f'{pattern!r}: {policy}' for pattern, policy in self.entries)}}})"


@dataclass(frozen=True, slots=True, repr=False)
class Strictly(Combination):
    """Keeps only what its policy says: routing results and activation collectives are recomputed too."""

    policy: Policy

    @property
    def keeps_defaults(self) -> bool:
        """That is what it is for."""
        return False

    def parts(self) -> tuple[Policy, ...]:
        """The one policy."""
        return (self.policy,)

    def within(self, region: str) -> Policy:
        """With the policy as it stands there."""
        return Strictly(self.policy.within(region))

    def __repr__(self) -> str:
        return f"strictly({self.policy})"


def first_match(*policies: PolicyLike) -> Policy:
    """Ask one policy after another; the first that decides about a site wins.

    Args:
        policies: policies of the catalogue. Functions and decisions, which decide about every site, may only come last.

    Raises:
        ValueError: none is given, or one can never be reached because the one before it decides about every site.
        TypeError: one is not a policy.

    >>> from recollect import policies
    >>> policy = policies.first_match(policies.save_attention, policies.save_every("aten.mm.default", 2))
    >>> from recollect import Site
    >>> policy.judge(Site(region="block", op="aten.mm.default", call=2)).by
    "save_every('aten.mm.default', 2)"
    >>> policies.first_match(policies.save_all, policies.save_matmuls)
    Traceback (most recent call last):
    ...
    ValueError: first_match never reaches save_matmuls: save_all before it decides for every site
    """
    if not policies:
        message = "first_match() needs a policy; to save nothing, use save_nothing"
        raise ValueError(message)
    if len(policies) == 1 and isinstance(policies[0], list | tuple):
        kind = type(policies[0]).__name__
        message = f"first_match takes policies one by one, not as a {kind}: write first_match(*policies)"
        raise TypeError(message)
    parts = tuple(map(as_policy, policies))
    for part, following in itertools.pairwise(parts):
        if part.answers_all:
            message = f"first_match never reaches {following}: {part} before it decides for every site"
            raise ValueError(message)
    return FirstMatch(parts)


def otherwise(policy: PolicyLike) -> Policy:
    """Decide about every site; put it last in `first_match`. A policy given here recomputes what it does not match.

    Raises:
        TypeError: it is neither.

    >>> from recollect import policies
    >>> from recollect import Decision, Site
    >>> policy = policies.first_match(policies.save_matmuls, policies.otherwise(Decision.RECOMPUTE))
    >>> policy.judge(Site(region="block", op="aten.sin.default"))
    Verdict(decision=<Decision.RECOMPUTE: 'recompute'>, by='otherwise(Decision.RECOMPUTE)')
    """
    return Otherwise(as_policy(policy))


def per_region(policies: Mapping[str, PolicyLike]) -> Policy:
    """Pick a policy by the region's name.

    Args:
        policies: a mapping from patterns over region names, as in `save_modules`, to policies. The first pattern that
            matches counts; a region that none matches is left to other policies, or recomputed.

    Raises:
        ValueError: none is given, or a pattern is empty or not a regular expression.
        TypeError: the argument is not a mapping, or one value is not a policy.

    >>> from recollect import policies
    >>> policies.per_region({"layers.[0-3]": policies.save_all, "layers.*": policies.save_matmuls})
    per_region({'layers.[0-3]': save_all, 'layers.*': save_matmuls})
    """
    if not isinstance(policies, Mapping):
        message = "per_region expects a mapping from patterns over region names to policies, not "
        message += describe_argument(policies)
        raise TypeError(message)
    if not policies:
        message = "per_region({}) names no region; to save nothing, use save_nothing"
        raise ValueError(message)
    for pattern in policies:
        compile_pattern(pattern)
    return PerRegion(tuple((pattern, as_policy(policy)) for pattern, policy in policies.items()))


def strictly(policy: PolicyLike) -> Policy:
    """Keep only what a policy says: recompute routing results and activation collectives too.

    Raises:
        TypeError: it is not a policy.

    >>> from recollect import policies
    >>> policies.strictly(policies.save_matmuls)
    strictly(save_matmuls)
    """
    return Strictly(as_policy(policy))
