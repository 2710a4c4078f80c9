"""Plan: what is to happen to the values of a step, site by site. Plain data; no torch here."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.decisions import Decision, Site
from recollect._core.documents import read_document, write_document
from recollect._core.forecasts import Fingerprint, Forecast, PlannedRegion
from recollect._core.levers import PlannedLever
from recollect._core.patterns import compile_pattern
from recollect._core.plan_text import describe_plan, describe_way, name_plan, plan_as_html

_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decision, and the sites that it applies to. A field that is None matches anything.

    Attributes:
        decision: what happens at these sites.
        region: pattern over the region's name, as in `recollect.policies`; ``""`` matches an empty name.
        module: pattern over the module's path.
        op: pattern over the operator's name.
        call: which call of the operator in the region.
        output: which of its outputs.
        is_exact: whether region, module and op are literal names instead of patterns.

    >>> from recollect import Choice, Decision, Site
    >>> norms = Choice(decision=Decision.RECOMPUTE, module="layers.*.norm")
    >>> norms.matches(Site(region="", op="aten.mul.Tensor", module="layers.3.norm"))
    True
    """

    decision: Decision
    region: str | None = None
    module: str | None = None
    op: str | None = None
    call: int | None = None
    output: int | None = None
    is_exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.decision, Decision):
            message = f"decision={short_repr(self.decision)}: expected a recollect.Decision, such as Decision.SAVE"
            raise TypeError(message)
        if self.is_exact and None in (self.region, self.module, self.op, self.call, self.output):
            message = f"{self}: an exact choice needs a region, a module, an op, a call and an output"
            raise ValueError(message)
        for pattern in (self.region, self.module, self.op):
            if pattern and not self.is_exact:
                compile_pattern(pattern)

    @classmethod
    def at(cls, site: Site, decision: Decision) -> Choice:
        """The decision for one value."""
        return cls(
            decision=decision,
            region=site.region,
            module=site.module,
            op=site.op,
            call=site.call,
            output=site.output,
            is_exact=True,
        )

    def matches(self, site: Site) -> bool:
        """Whether it applies to this site."""
        return _matcher(self)(site)


@dataclass(frozen=True, kw_only=True)  # without slots, for the one index that is made when it is first asked
class Plan:
    """Which modules of a step become regions, and what they keep. It prints as a table.

    `recollect.plan` makes a plan for a budget, and `recollect.apply` applies it to a model. The first choice that
    matches a site decides.

    Attributes:
        choices: decisions, in the order in which they are tried.
        name: what reports call it.
        regions: the modules that become regions; values in them that no choice matches are recomputed.
        forecast: predictions and measurements; None for a plan written by hand.
        fingerprint: identifies the step that the plan was made for.
        levers: what it does beyond keeping and recomputing values.
        notes: what was assumed, in sentences.

    >>> from recollect import Choice, Decision, Plan, Site
    >>> plan = Plan(choices=(
    ...     Choice(decision=Decision.SAVE, op="aten.mm.default"),
    ...     Choice(decision=Decision.RECOMPUTE, module="layers.**"),
    ... ))
    >>> plan.decide(Site(region="", op="aten.mm.default", module="layers.0"))
    <Decision.SAVE: 'save'>
    >>> plan.decide(Site(region="", op="aten.mul.Tensor", module="head")) is None
    True
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    choices: tuple[Choice, ...] = ()
    name: str = ""
    regions: tuple[PlannedRegion, ...] = ()
    forecast: Forecast | None = None
    fingerprint: Fingerprint | None = None
    levers: tuple[PlannedLever, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the whole step, as ``max_memory_allocated`` counts it.

        Raises:
            ValueError: the plan was written by hand and has no predictions.
        """
        return self._promised().peak_bytes

    @property
    def step_s(self) -> float:
        """The predicted time of the step.

        Raises:
            ValueError: the plan was written by hand and has no predictions.
        """
        return self._promised().step_s

    @property
    def lower_bound_s(self) -> float | None:
        """The time that no plan that only recomputes can beat within the same budget; None if unknown.

        Raises:
            ValueError: the plan was written by hand and has no predictions.
        """
        return self._promised().lower_bound_s

    def _promised(self) -> Forecast:
        if self.forecast is None:
            message = (
                f"plan {self.name!r} has no forecast: it was written by hand. `recollect.plan` makes plans that have "
                "one"
            )
            raise ValueError(message)
        return self.forecast

    def diff(self, other: Plan) -> str:
        """What another plan does differently, region by region, in lines of text; empty if nothing.

        >>> full = PlannedRegion(path="layers.0", kind="Block", way="rerun")
        >>> print(Plan(regions=(full,)).diff(Plan()))
        layers.0: rerun -> plain
        """
        if not isinstance(other, Plan):
            message = f"diff expects another plan, not {describe_argument(other)}"
            raise TypeError(message)
        mine, theirs = ({region.path: region for region in plan.regions} for plan in (self, other))
        lines = [
            f"{path}: {_describe_region(mine.get(path))} -> {_describe_region(theirs.get(path))}"
            for path in dict.fromkeys([*mine, *theirs])
            if _describe_region(mine.get(path)) != _describe_region(theirs.get(path))
        ]
        if set(self.levers) != set(other.levers):
            lines.append(f"levers: {_describe_levers(self.levers)} -> {_describe_levers(other.levers)}")
        if set(self.choices) != set(other.choices) and not lines:
            lines = [f"{len(set(self.choices) ^ set(other.choices))} choices differ"]
        return "\n".join(lines)

    @classmethod
    def of(cls, policy: Callable[[Site], Decision | None], sites: Iterable[Site], *, name: str = "") -> Plan:
        """Make a plan of what a policy decides for these sites; those for which it returns None are left out.

        >>> here = Site(region="block", op="aten.mm.default")
        >>> Plan.of(lambda site: Decision.SAVE, [here]).decide(here)
        <Decision.SAVE: 'save'>
        """
        decisions = ((site, policy(site)) for site in sites)
        return cls(choices=tuple(Choice.at(site, made) for site, made in decisions if made is not None), name=name)

    def decide(self, site: Site) -> Decision | None:
        """What happens at this site; None if no choice matches it."""
        at, choice = self._exact.get(_key(site), (len(self.choices), None))
        for position, matches, other in self._patterns:
            if position > at:
                break
            if matches(site):
                return other.decision
        return None if choice is None else choice.decision

    def unmatched(self, sites: Iterable[Site]) -> tuple[Choice, ...]:
        """The choices that match none of these sites."""
        known = list(sites)
        keys = set(map(_key, known))
        return tuple(
            choice
            for choice in self.choices
            if not (_key(choice) in keys if choice.is_exact else any(map(_matcher(choice), known)))
        )

    @property
    def digest(self) -> str:
        """A short key for caches, equal for plans that decide the same and for no others."""
        decides = replace(self, forecast=None, fingerprint=None, notes=())
        return hashlib.sha256(decides.to_json().encode()).hexdigest()[:32]

    def __str__(self) -> str:
        """The plan as a table."""
        return describe_plan(self.name, self.regions, self.forecast, len(self.choices), self.levers)

    def __repr__(self) -> str:
        """One line; `print` shows all of it."""
        return f"<{name_plan(self.name, self.regions, self.forecast, len(self.choices))}>"

    def _repr_html_(self) -> str:
        return plan_as_html(self.name, self.regions, self.forecast, len(self.choices), self.levers)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads."""
        return write_document(self, kind="plan", version=_VERSION)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not a plan, or has a later version.
        """
        return read_document(text, cls, kind="plan", version=_VERSION)

    @functools.cached_property
    def _exact(self) -> dict[tuple[object, ...], tuple[int, Choice]]:
        """The first exact choice for each site, with its position."""
        index: dict[tuple[object, ...], tuple[int, Choice]] = {}
        for position, choice in enumerate(self.choices):
            if choice.is_exact:
                index.setdefault(_key(choice), (position, choice))
        return index

    @functools.cached_property
    def _patterns(self) -> list[tuple[int, Callable[[Site], bool], Choice]]:
        return [(at, _matcher(choice), choice) for at, choice in enumerate(self.choices) if not choice.is_exact]


def _describe_region(region: PlannedRegion | None) -> str:
    if region is None:
        return "plain"
    return f"{describe_way(region)}, keeps {region.keeps}" if region.keeps else describe_way(region)


def _describe_levers(levers: tuple[PlannedLever, ...]) -> str:
    return ", ".join(map(str, levers)) or "none"


def _key(place: Site | Choice) -> tuple[object, ...]:
    return (place.region, place.module, place.op, place.call, place.output)


def _matcher(choice: Choice) -> Callable[[Site], bool]:
    if choice.is_exact:
        return lambda site: _key(site) == _key(choice)
    region, module, op = map(_text_matcher, (choice.region, choice.module, choice.op))
    return lambda site: (
        region(site.region)
        and module(site.module)
        and op(site.op)
        and choice.call in (None, site.call)
        and choice.output in (None, site.output)
    )


def _text_matcher(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda _: True
    return compile_pattern(pattern) if pattern else lambda text: not text
