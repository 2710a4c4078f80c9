"""What a policy decided in one region, site by site: asked once, replayed on later calls, and there to be explained.

`Decisions` belong to a region, a policy and a kind of call (`knowledge.py` finds them). Their lines stand in the order
in which the operators ran. A later call that runs the same operators on the same shapes gets the decision without
asking; where it differs, the policy is asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from recollect._core.decisions import Decision, Site
from recollect._core.operators import (
    Operator,
    count_flops,
    is_wrapper,
    operator_of,
    parts_of,
    tensors_in,
)
from recollect._core.places import Place
from recollect._core.torch_private.intercept import can_intercept
from recollect._core.torch_private.schemas import in_place_of
from recollect._policy.base import Policy, Verdict
from recollect._policy.judging import judge
from recollect._selective.program import Program

NOT_SAVED = Verdict(Decision.RECOMPUTE, "made without gradients, so a plain step would not hold it")
RUNS_AGAIN = Verdict(Decision.RECOMPUTE, "it can only run again")


@dataclass(slots=True, kw_only=True)
class DecisionLine:
    """One call of an operator or block, and what becomes of its result.

    Attributes:
        key: the operator itself, or the path or name of a block that is kept whole.
        shapes: of its tensor results; other shapes are another site.
        sites: one for each tensor it gives; none for a block.
        what: the operator or block, in words.
        decision: for the whole call.
        by: the rule that decided.
        place: where it was called.
        bytes: of its results.
        matched: how often the decision was carried out.
        number: the operator, whether grad mode was on, and which call of it; None for a block.
        draws: it has drawn random numbers.
        is_routing: its result chooses, or follows a choice.
        is_written: the function writes into the result afterwards, so that only a copy can be kept.
        is_impure: a block writes into what others may read, so that it must run again.
        fills: a collective fills its arguments.
        keeps_write: it writes in place, and a plan has its result kept where the region is replayed.
    """

    key: Any
    shapes: tuple[Any, ...]
    what: str
    decision: Decision
    by: str
    sites: tuple[Site, ...] = ()
    place: Place | None = None
    bytes: int = 0
    matched: int = 0
    number: tuple[Any, bool, int] | None = None
    draws: bool = False
    is_routing: bool = False
    keeps_write: bool = False
    is_written: bool = False
    is_impure: bool = False
    fills: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether recomputation is given the result."""
        return self.decision is not Decision.RECOMPUTE

    @property
    def is_offloaded(self) -> bool:
        """Whether the result lives elsewhere until then."""
        return self.decision is Decision.OFFLOAD


RECOMPUTED = DecisionLine(key=None, shapes=(), what="", decision=Decision.RECOMPUTE, by="")
"""Of a call that nobody keeps."""
_SIZES = frozenset({"shape", "bytes", "flops"})
_SITE_FIELDS = tuple(one.name for one in fields(Site))


class _WatchedSite(Site):
    """A site that knows whether anybody asked for its size."""

    was_measured = False

    def __getattribute__(self, name: str) -> Any:
        if name in _SIZES:
            object.__setattr__(self, "was_measured", True)
        return super().__getattribute__(name)


def shapes_of(result: Any) -> tuple[Any, ...]:
    """What tells one site from another, apart from the operator."""
    if isinstance(result, Tensor):
        return (result.shape,)
    return tuple(tensor.shape for tensor in tensors_in(result))


@dataclass(slots=True, kw_only=True)
class Decisions:
    """The decisions of one policy in one region.

    Attributes:
        lines: one for each operator call outside of kept blocks, in order.
        blocks: one for each block that was kept whole.
        unneeded: calls of blocks that recomputation stops before: their results are not held.
        draws: whether the region draws random numbers; None while unknown.
        names: all names that were given, and the rule by which each is kept.
        is_varying: the policy goes by sizes, and they differ from call to call: it is asked at each.
        named: the names by which values were kept.
        is_stale: whether a value was given a name that nobody had given when the region was learned.
        has_backward: whether the function runs a backward pass itself: then blocks cannot be cut out of its graph.
        is_learned: whether a whole forward was seen.
        keeps_ops: whether single operators are kept.
        fills: whether collectives fill memory that the function takes.
        gathers: whether parameters are gathered inside the function.
        saved: how many tensors the region saves: another number is another way through the function.
        kept: how many operators a forward keeps with grad mode on.
        is_proven: whether it was seen that results are kept as the operators gave them, where only those are looked at.
        is_other_unseen: whether it was seen that other operators run where only those are looked at: so all must be.
        looks_at_sizes: whether the policy went by the size of a value.
        ops: the operators that need to be looked at once it is learned; None where all do.
        by_call: the lines of those, by their numbers.
        wanted: which calls of those are kept, if all of them are plain (`serving.py`); None if some are not.
        may_record: whether a recording is worth trying.
        program: how to replay it; None if its function must be run again.
        why_no_program: why it is not.
        unwatched: how many calls went as learned without being watched: they are in no line's count.
        breaks: how many did not.
        undropped: `lines` and `kept` as the policy chose them, where `drop` was called.
    """

    region: str
    policy: Policy
    lines: list[DecisionLine] = field(default_factory=list)
    blocks: dict[Any, DecisionLine] = field(default_factory=dict)
    unneeded: set[Any] = field(default_factory=set)
    draws: bool | None = None
    named: set[str] = field(default_factory=set)
    is_stale: bool = False
    has_backward: bool = False
    is_learned: bool = False
    keeps_ops: bool = False
    fills: bool = False
    gathers: bool = False
    saved: int = -1
    kept: int = -1
    is_proven: bool = False
    is_other_unseen: bool = False
    looks_at_sizes: bool = False
    ops: frozenset[Any] | None = None
    by_call: dict[tuple[Any, bool, int], DecisionLine] = field(default_factory=dict)
    wanted: dict[Any, dict[int, bool]] | None = None
    may_record: bool = True
    program: Program | None = None
    why_no_program: str | None = None
    unwatched: int = 0
    breaks: int = 0
    names: dict[str, str | None] = field(default_factory=dict)
    is_varying: bool = False
    undropped: tuple[list[DecisionLine], int] | None = None

    def forget(self) -> None:
        """The region went another way than learned: learn it anew at its next call."""
        for line in self.lines:
            line.matched += self.unwatched
        self.unwatched = 0
        self.is_learned = self.is_stale = self.is_proven = self.is_other_unseen = False
        self.program = self.ops = self.wanted = self.undropped = None

    def drop(self, why: str) -> None:
        """Keep no operators after all, except those that choose and those that other processes take part in."""
        self.undropped = self.lines, self.kept
        self.lines = [
            replace(line, decision=Decision.RECOMPUTE, by=why) if line.is_kept and not _is_shared(line) else line
            for line in self.lines
        ]
        kept = [line for line in self.lines if line.is_kept]
        self.kept = sum(line.number is not None and line.number[1] for line in kept)
        self.keeps_ops = bool(kept)
        self._choose_ops(sees_all=self.ops is None)

    def learn(self, *, saved: int, kept: int, sees_all: bool) -> None:
        """A whole forward was seen.

        Args:
            saved: how many tensors it saved.
            kept: how many operators it kept with grad mode on.
            sees_all: whether every call must be seen again, whatever was kept.
        """
        self.is_learned, self.saved, self.kept = True, saved, kept
        self.is_proven = False  # of what is kept now
        self.keeps_ops = any(line.is_kept or line.keeps_write for line in self.lines)
        self.fills = any(line.fills for line in self.lines)
        self._choose_ops(sees_all=sees_all or bool(self.named))

    def _choose_ops(self, *, sees_all: bool) -> None:
        asks = self.is_varying
        kept = [line for line in self.lines if line.is_kept or (asks and operator_of(line.key).can_be_kept)]
        can_choose = all(can_intercept(line.key) and not operator_of(line.key).is_collective for line in kept)
        if sees_all or self.is_other_unseen or not can_choose:
            self.ops = self.wanted = None
            return
        self.ops = frozenset(line.key for line in kept)
        self.wanted = None if asks or self.has_backward or self.offloads else _plain_calls(kept)
        self.by_call = {line.number: line for line in self.lines if line.key in self.ops and line.number is not None}

    def ops_to_prove(self) -> frozenset[Any]:
        """Those, and what may do in place what learning saw done anew, under a dispatch mode.

        Without one, `linear` adds its bias in place, to an unsafe view of the product, and attention that is composed
        its mask: no version shows it. Nor do the bits, which may be the same at the call that proves: a bias is zero at
        first, or too small for the dtype, and grows afterwards.
        """
        assert self.ops is not None
        return self.ops.union(filter(None, (in_place_of(line.key) for line in self.lines)))

    @property
    def offloads(self) -> bool:
        """Whether some of what is kept lives elsewhere until backward."""
        return any(line.is_offloaded for line in self.lines)

    def note_proof(self, count_calls: Callable[[Any, bool], int]) -> None:
        """A forward, of which only some operators were seen, has shown which results the function writes into.

        Without a dispatch mode some operators are made of others: if those that matter were called another number of
        times than when all were seen, all must be seen.
        """
        self.is_proven = True
        learned = Counter(line.number[:2] for line in self.by_call.values() if line.number is not None)
        self.is_other_unseen = any(count_calls(*called) != times for called, times in learned.items())
        self._choose_ops(sees_all=self.ops is None)

    def vary(self) -> Decisions:
        """The same decisions for calls of any size: of these no program is made."""
        why = "its inputs have had three different sizes, and a program works for one size only"
        other = replace(
            self, program=None, may_record=False, why_no_program=why, is_varying=self.looks_at_sizes, unwatched=0
        )
        if self.undropped is not None:  # it may come to be worth it
            (other.lines, other.kept), other.undropped = self.undropped, None
            other.keeps_ops, other.is_proven = True, False
        other.keeps_ops = other.keeps_ops or self.looks_at_sizes
        other.is_proven = self.is_proven and not self.looks_at_sizes  # it may come to keep others than were proven
        other._choose_ops(sees_all=self.ops is None)  # noqa: SLF001 (its own)
        return other

    def decide(self, func: Any, operator: Operator, call: int, args: Any, kwargs: Any, result: Any) -> DecisionLine:  # noqa: PLR0917
        """What was learned of a call; a policy that goes by sizes is asked again where they differ."""
        line = self.by_call.get((func, torch.is_grad_enabled(), call), RECOMPUTED)
        if self.is_varying and line is not RECOMPUTED and line.shapes != shapes_of(result):
            line = self._judge_again(line, operator, args, kwargs, result)
        return line

    def _judge_again(self, line: DecisionLine, operator: Operator, args: Any, kwargs: Any, result: Any) -> DecisionLine:
        flops = count_flops(operator, args, kwargs, result)
        sites = [
            replace(site, shape=tuple(tensor.shape), bytes=bytes_of(tensor), flops=flops)
            for site, tensor in zip(line.sites, tensors_in(result), strict=False)
        ]
        decision = strongest([self.judge(site) for site in sites]).decision
        return line if line.decision is decision else replace(line, decision=decision)

    def rule_for(self, name: str) -> str | None:
        """The rule by which something of this name is kept."""
        if name not in self.names:
            self.names[name] = self.policy.keeps_name(name)
        return self.names[name]

    def judge(self, site: Site) -> Verdict:
        """Ask the policy about a site."""
        watched = _WatchedSite(**{name: getattr(site, name) for name in _SITE_FIELDS})
        verdict = judge(self.policy, watched)
        self.looks_at_sizes = self.looks_at_sizes or watched.was_measured
        return verdict

    def rule_for_function(self, name: str, call: int) -> Verdict | None:
        """The verdict by which one call of a custom Function is kept whole."""
        verdict = self.judge(Site(region=self.region, op=name, call=call))
        return None if verdict.decision is Decision.RECOMPUTE else verdict

    def add_block(self, key: tuple[str, str], by: str, decision: Decision = Decision.SAVE) -> DecisionLine:
        """A line for a block that is kept whole."""
        kind, name = key
        line = self.blocks[key] = DecisionLine(key=key, shapes=(), what=f"{kind} '{name}'", decision=decision, by=by)
        return line


@dataclass(slots=True, kw_only=True)
class KnownDecisions(Decisions):
    """Those of a policy that keeps blocks by name alone: nothing is learned, so that no mode is ever needed."""

    is_learned: bool = True
    may_record: bool = False
    why_no_program: str | None = "only blocks are kept"

    def forget(self) -> None:
        """There is nothing to learn anew."""


def strongest(verdicts: list[Verdict]) -> Verdict:
    """What holds for a call of several results: it is kept here if one is to be, else elsewhere, else recomputed."""
    for decision in (Decision.SAVE, Decision.OFFLOAD):
        for verdict in verdicts:
            if verdict.decision is decision:
                return verdict
    return verdicts[0]


def _is_shared(line: DecisionLine) -> bool:
    """Whether more depends on a call than its result."""
    return line.is_routing or operator_of(line.key).is_collective


def _plain_calls(lines: list[DecisionLine]) -> dict[Any, dict[int, bool]] | None:
    """The calls of each operator, and whether a copy is kept; None if one of them writes or has no gradients."""
    found: dict[Any, dict[int, bool]] = {}
    for line in lines:
        operator = operator_of(line.key)
        func, is_tracked, call = line.number or (None, False, 0)
        is_plain = not (operator.writes or operator.hides_writes or operator.is_collective)
        if not is_plain or not is_tracked:
            return None
        found.setdefault(func, {})[call] = line.is_written
    return found


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a distributed one, those that are here."""
    if is_wrapper(tensor):
        return sum(map(bytes_of, parts_of(tensor)))
    try:
        return tensor.numel() * tensor.element_size()
    except RuntimeError:  # a layout that does not say
        return 0
