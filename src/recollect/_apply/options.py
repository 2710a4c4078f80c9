"""What a caller may choose about a region, in one place for functions, modules and rules."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import distributed, nn

from recollect._apply.forwards import functions_in
from recollect._apply.offloading import Elsewhere, HoldsElsewhere, parse_elsewhere
from recollect._core.argument_text import short_repr
from recollect._core.decisions import Decision
from recollect._core.patterns import did_you_mean, hint_nearest, nearest, quote_all
from recollect._core.torch_private.collectives import process_groups
from recollect._core.torch_private.functorch import transforms_active
from recollect._offload.offload import Offload, TierLike
from recollect._policy.base import Policy, PolicyLike, as_policy
from recollect._policy.presets import ReadyMade, Tally, is_telling, selective
from recollect._policy.rules import save_nothing
from recollect._recompute.joins import Joining
from recollect._recompute.match import Check, Matcher
from recollect._recompute.region import Region
from recollect._recompute.rng import parse_preserve
from recollect._recompute.way import Options
from recollect._selective.region import SelectiveRegion
from recollect.policies import __all__ as _catalogue

_DEFAULTS = Options(preserve=parse_preserve(preserve=True), early_stop=True, matcher=Matcher())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How to make a region; serves any number of them."""

    options: Options = _DEFAULTS
    policy: Policy | None = None
    elsewhere: Elsewhere | None = None
    joining: Joining | None = None

    def region(self, name: str, fn: Callable[..., Any]) -> Region:
        """A function as a region of that name."""
        region = self._make_region(name, fn)
        if self.joining is not None and not has_peers():  # whose parameters may not be here when another one asks
            region.joining = self.joining
        return region

    def _make_region(self, name: str, fn: Callable[..., Any]) -> Region:
        if self.elsewhere is not None:
            return self._sending_region(name, fn, self.elsewhere)
        if self.policy is None:
            return DefaultRegion(name, fn, self.options)
        return SelectiveRegion(name, fn, self.options, self.policy)

    def _sending_region(self, name: str, fn: Callable[..., Any], elsewhere: Elsewhere) -> Region:
        region: SendingRegion | SendingSelectiveRegion
        if self.policy is None:
            region = SendingRegion(name, fn, self.options)
        else:
            region = SendingSelectiveRegion(name, fn, self.options, self.policy)
        region.elsewhere = elsewhere
        return region

    @property
    def sends(self) -> str:
        """What compiled code makes of where holdings go, in a word."""
        return "" if self.elsewhere is None else self.elsewhere.in_graph

    def suited(self, module: nn.Module | None) -> Choices:
        """The same for this module: what a ready-made policy keeps depends on what the module consists of."""
        if module is None or not isinstance(self.policy, ReadyMade):
            return self
        # Of parametrizations only the results matter: a weight norm says nothing about activations.
        parts = [part for path, part in module.named_modules() if "parametrizations" not in path.split(".")]
        return replace(self, policy=self.policy.suited(name for part in parts for name in _names_in(part)))

    @property
    def tally(self) -> Tally | None:
        """What a ready-made policy was asked and kept; None for other policies."""
        return self.policy.tally if isinstance(self.policy, ReadyMade) else None


def _names_in(part: nn.Module) -> Iterator[str]:
    """What a part of a module does, in names: its class, if that is a layer's; if not, the functions it names."""
    is_layer = next(part.children(), None) is None or next(part.parameters(recurse=False), None) is not None
    if is_layer and is_telling(type(part).__name__):
        yield type(part).__name__
    else:
        yield from functions_in(part)


_WEIGHED = frozenset({"aten.convolution.default", "aten.mm.default", "aten.addmm.default"})
"""Operators that "selective" keeps where that pays."""


def warn_if_nothing_kept(tally: Tally, where: str) -> None:
    """Say once that a ready-made policy keeps nothing, and what would help."""
    if tally.is_reported or not tally.keeps_nothing:
        return
    tally.is_reported = True
    op = tally.most_expensive()
    if op in _WEIGHED:
        advice = f"Keeping {op} there would hold about as much memory as the plain step. Use 'full' or 'every:2'."
    else:
        advice = f"Keep what is expensive there, as in policy=recollect.policies.save_ops({op!r}), or use 'full'."
    message = (
        f"'selective' keeps nothing in {where}: none of what it keeps ran there (attention, every "
        "second matrix product, convolutions before a norm). Everything is recomputed, so the "
        "policy only costs time.\n"
        f"{advice}"
    )
    warnings.warn(message, UserWarning, stacklevel=2)


def parse_choices(
    *,
    policy: PolicyLike | str | None = None,
    preserve_rng: bool | Iterable[str] = True,
    early_stop: bool = True,
    check: Check = "metadata",
    offload_inputs: bool = False,
    offload_to: TierLike | Offload | None = None,
) -> Choices:
    """Check what a caller chose.

    Raises:
        ValueError: an option has a value it cannot have.
        TypeError: the policy is none.
    """
    if not isinstance(early_stop, bool):
        message = f"early_stop={early_stop!r}: expected True or False"
        raise ValueError(message)  # noqa: TRY004 (as for every other option)
    if preserve_rng is True and early_stop is True and check == "metadata":
        options = _DEFAULTS
    else:
        options = Options(preserve=parse_preserve(preserve_rng), early_stop=early_stop, matcher=Matcher.parse(check))
    parsed = _parse_policy(policy)
    if not offload_inputs and offload_to is None:
        return Choices(options=options, policy=parsed)
    elsewhere = parse_elsewhere(offload_inputs=offload_inputs, offload_to=offload_to, has_policy=parsed is not None)
    return Choices(options=options, policy=parsed, elsewhere=elsewhere)


def _parse_policy(policy: PolicyLike | str | None) -> Policy | None:
    if policy is None or policy == "full":
        return None
    if isinstance(policy, str):
        if policy != "selective":
            message = f"policy={short_repr(policy)}: expected 'full', 'selective', one of recollect.policies or a "
            message += f"function{hint_at(policy)}"
            raise ValueError(message)
        return selective()
    return as_policy(policy)


def hint_at(word: str) -> str:
    """What a word that is none of ours probably means, to end an error with.

    >>> hint_at("save_matmuls"), hint_at("recompute"), hint_at("selectiv"), hint_at("save_matmul")
    ('; write recollect.policies.save_matmuls', '; write recollect.Decision.RECOMPUTE', "; did you mean 'selective'?",
     '; did you mean recollect.policies.save_matmuls?')
    >>> hint_at("80%"), hint_at("layers")
    ('; for a budget, use recollect.fit(model, batch, budget=...)', '')
    """
    if word in _catalogue:
        return f"; write recollect.policies.{word}"
    if word in (decision.value for decision in Decision):
        return f"; write recollect.Decision.{word.upper()}"
    if _SIZE.fullmatch(word):
        return "; for a budget, use recollect.fit(model, batch, budget=...)"
    if word.endswith(".json") or word.startswith("{"):
        return "; to read a plan, write recollect.Plan.from_json(Path('plan.json').read_text())"
    near = nearest(word, _catalogue)
    policy = f"; did you mean recollect.policies.{near[0]}?" if near else ""
    return hint_nearest(word, ("full", "selective")) or policy


OPTIONS = ("policy", "preserve_rng", "early_stop", "check", "offload_inputs", "offload_to")


def parse_mapping(options: Mapping[str, Any]) -> Choices:
    """Check choices that are written as a mapping from option to value.

    Raises:
        ValueError: there is no such option, or it has a value it cannot have.

    >>> parse_mapping({"early_stop": False}).options.early_stop
    False
    >>> parse_mapping({"earlystop": False})
    Traceback (most recent call last):
    ...
    ValueError: there is no option 'earlystop'; did you mean 'early_stop'?
    """
    for name in options:
        if name not in OPTIONS:
            near = nearest(str(name), OPTIONS)
            found = did_you_mean(near) if near else f"the options are {quote_all(OPTIONS)}"
            message = f"there is no option {name!r}; {found}"
            raise ValueError(message)
    return parse_choices(**options)


_SIZE = re.compile(r"[\d.]+ ?(%|[kmgt]i?b?)", re.IGNORECASE)


class DefaultRegion(Region):
    """A region for which no policy was given: it keeps nothing, except what came from other processes.

    Among several processes a collective that runs again costs its time again, and one that only some of them run again
    never ends. So there the region runs under `save_nothing`, which keeps what activation collectives gave.
    """

    __slots__ = ("_shared",)

    _shared: SelectiveRegion

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a region."""
        if not has_peers() or transforms_active():
            return Region.run(self, args, kwargs)  # not by `super()`: this runs at every call
        try:
            shared = self._shared
        except AttributeError:
            shared = self._shared = SelectiveRegion(self.name, self.fn, self.options, save_nothing)
        return shared.run(args, kwargs)


class SendingRegion(HoldsElsewhere, DefaultRegion):
    """A region without a policy that holds its arguments elsewhere."""

    __slots__ = ("elsewhere",)


class SendingSelectiveRegion(HoldsElsewhere, SelectiveRegion):
    """A region with a policy that holds its arguments elsewhere, or what the policy offloads on a tier of choice."""

    __slots__ = ("elsewhere",)

    holds_elsewhere = True


def has_peers() -> bool:
    """Whether other processes take part in this one's training. Costs 0.3 µs alone."""
    return bool(process_groups()) and distributed.is_initialized() and distributed.get_world_size() > 1
