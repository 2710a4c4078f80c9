"""What a policy is: a function from a site to a decision, and what else the engine may ask one of the catalogue."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from types import FunctionType, MethodType
from typing import Any, NoReturn

from torch import nn

from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.decisions import Decision, Site
from recollect._core.signatures import read_annotations, read_signature
from recollect._core.torch_private.ops import op_name

PolicyLike = Callable[[Site], Decision] | Decision
"""Any function of a site, or one decision for all. Those of the catalogue are `Policy` objects, which can say more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision, and the words of the rule that made it."""

    decision: Decision
    by: str


class Policy(ABC):
    """A policy of the catalogue: frozen, compared by value, and silent (None) about sites it has nothing to say of.

    The engine asks `judge` once per site. Whole module calls, `recollect.region` blocks and named values are asked
    about by `keeps_module` and `keeps_name`, before their operators run; what is kept whole has no sites inside.
    """

    @abstractmethod
    def judge(self, site: Site) -> Verdict | None:
        """What happens to the value made at this site; None to leave it to others."""

    def __or__(self, other: object) -> NoReturn:
        message = f"policies cannot be joined with |: write policies.first_match({self}, {short_repr(other)})"
        raise TypeError(message)

    @property
    def sees_names(self) -> bool:
        """Whether it goes by the names that `recollect.region` and `recollect.name` give."""
        return False

    @property
    def keeps_defaults(self) -> bool:
        """Whether routing results and activation collectives are kept although no rule says so."""
        return True

    @property
    def is_known_before(self) -> bool:
        """Whether it keeps blocks by name alone, so that there is nothing to learn of the operators that run."""
        return False

    @property
    def keeps_what_pays(self) -> bool:
        """Whether it is meant to save time, so that nothing need be kept where that takes longer."""
        return False

    @property
    def replays(self) -> bool | None:
        """Whether what is recomputed is replayed, call by call, where that can be; None: where it looks quicker."""
        return None

    @property
    def keeps_casts(self) -> bool:
        """Whether a replayed region holds what autocast makes of its parameters; nobody is asked about them apart."""
        return False

    @property
    def labels(self) -> tuple[str, ...]:
        """Its rules in words, as verdicts name them: those that match nothing in a step are warned about."""
        return ()

    @property
    def answers_all(self) -> bool:
        """Whether it has an answer for every site, so that what comes after it is never asked."""
        return False

    @property
    def functions(self) -> tuple[type, ...]:
        """The subclasses of `torch.autograd.Function` that it goes by, each seen as one operator of its own name."""
        return ()

    def keeps_module(self, path: str, module: Any) -> str | None:
        """The words of the rule by which a module's calls are kept whole; None if none does."""
        del path, module
        return None

    def keeps_name(self, name: str) -> str | None:
        """The words of the rule by which a named block or value is kept; None if none does."""
        del name
        return None

    def check_modules(self, paths: dict[str, Any]) -> None:
        """Refuse patterns that match none of the region's modules.

        Raises:
            ValueError: one matches nothing; it says what is near.
        """
        del paths

    def within(self, region: str) -> Policy:
        """The policy as it stands for one region."""
        del region
        return self

    def __call__(self, site: Site | None = None) -> Decision:
        """Decide: as a plain function would.

        Raises:
            TypeError: there is no site: a policy was called as if it were a function that makes one.
        """
        if site is None:
            message = f"{self} is a policy as it is: write it without parentheses"
            raise TypeError(message)
        verdict = self.judge(site)
        return Decision.RECOMPUTE if verdict is None else verdict.decision


class CallPolicy(Policy):
    """A policy that goes by the operator and its arguments, as torch's do; in graphs only.

    What it answers is torch's word for it, which the partitioner is given as it is.
    """

    @abstractmethod
    def judge_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What happens to the result of one call, as a ``CheckpointPolicy``; None if it can only run again."""

    def judge(self, site: Site) -> Verdict | None:
        """Nothing: a site does not know the arguments."""
        del site
        return None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FunctionPolicy(Policy):
    """A user's own function of a site. Two are the same if their functions are one object."""

    fn: Callable[[Site], Decision]

    @property
    def answers_all(self) -> bool:
        """A function has no way to leave a site to others."""
        return True

    def judge(self, site: Site) -> Verdict:
        """What the function says.

        Raises:
            TypeError: it says something else than a decision.
        """
        decision = self.fn(site)
        if not isinstance(decision, Decision):
            message = (
                f"policy {self} answered {decision!r} for {site.op} in region {site.region!r}, which is not a "
                "decision.\n"
                "Return recollect.Decision.SAVE or recollect.Decision.RECOMPUTE, in every branch of the function."
            )
            raise TypeError(message)
        return Verdict(decision, by=repr(self))

    def __repr__(self) -> str:
        return name_function(self.fn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionPolicy) and identify(self.fn) == identify(other.fn)

    def __hash__(self) -> int:
        return hash(identify(self.fn))


@dataclass(frozen=True, slots=True, repr=False)
class DecisionPolicy(Policy):
    """One decision for every site."""

    decision: Decision

    @property
    def answers_all(self) -> bool:
        """Nothing is left to others."""
        return True

    def judge(self, site: Site) -> Verdict:
        """The decision."""
        del site
        return Verdict(self.decision, by=repr(self))

    def __repr__(self) -> str:
        return f"Decision.{self.decision.name}"


# Made once: inside of code that Dynamo traces, as_policy would give it an object that is not built yet.
_DECIDED = {decision: DecisionPolicy(decision) for decision in Decision}


def as_policy(policy: PolicyLike) -> Policy:
    """What the engine can ask: a policy of the catalogue as it is, a function or a decision wrapped into one.

    Raises:
        TypeError: it is none of these.

    >>> def keep_first(site):
    ...     return Decision.SAVE if site.call == 0 else Decision.RECOMPUTE
    >>> as_policy(keep_first).judge(Site(region="block", op="aten.mm.default"))
    Verdict(decision=<Decision.SAVE: 'save'>, by='keep_first')
    >>> as_policy("matmuls")
    Traceback (most recent call last):
    ...
    TypeError: expected a policy: one of recollect.policies, a function from a recollect.Site to a recollect.Decision,
    or a recollect.Decision; not str 'matmuls'
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Decision):
        return _DECIDED[policy]
    expected = (
        "expected a policy: one of recollect.policies, a function from a recollect.Site to a recollect.Decision, or a "
        "recollect.Decision; not "
    )
    if isinstance(policy, list | tuple | set | frozenset | dict):
        message = (
            f"{expected}{describe_argument(policy)}.\n"
            "Combine policies with policies.first_match(...), keep operators with policies.save_ops(...), "
            "tell regions apart with policies.per_region({...})."
        )
        raise TypeError(message)
    if not callable(policy) or isinstance(policy, nn.Module):
        message = expected + describe_argument(policy)
        raise TypeError(message)
    if read_annotations(policy).get("return") in ("Policy", Policy):
        message = f"{name_function(policy)} makes a policy but is not one itself: call it"
        raise TypeError(message)
    stranger = _describe_stranger(policy)
    if stranger:
        message = expected + stranger
        raise TypeError(message)
    if not takes(policy, 1):
        message = (
            f"policy {name_function(policy)} cannot be called with one argument: a policy gets a recollect.Site and "
            "returns a recollect.Decision.\n"
            "Functions for torch's create_selective_checkpoint_contexts get other arguments: pass them to the one in "
            "recollect.compat."
        )
        raise TypeError(message)
    return FunctionPolicy(policy)


def _describe_stranger(fn: Callable[..., Any]) -> str:
    """What can be called, but certainly not with a site, and what may be meant by it; nothing of anything else."""
    if isinstance(fn, type):
        text = f"the class {fn.__name__}"
        if issubclass(fn, nn.Module):
            text += f".\nTo choose modules by class, write recollect.apply(model, {{{fn.__name__}: 'full'}})"
        return text
    operator = op_name(fn)
    if operator is not None:
        return f"the operator {operator}.\nTo keep its results, write policies.save_ops({operator!r})"
    is_ours = getattr(sys.modules.get("recollect"), getattr(fn, "__name__", ""), None) is fn
    return f"recollect.{fn.__name__} itself" if is_ours else ""


def takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as its signature says.

    >>> takes(len, 1), takes(lambda site: site, 1), takes(lambda ctx, op, *args: op, 1)
    (True, True, False)
    """
    try:
        signature = read_signature(fn)
    except (ValueError, TypeError):  # builtins and compiled functions without one
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def name_function(fn: Callable[..., Any]) -> str:
    """What to call a user's function in reports: its name, and for a lambda where it is written.

    >>> name_function(as_policy), name_function(functools.partial(as_policy))
    ('as_policy', 'as_policy')
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, FunctionType) and fn.__name__ == "<lambda>":
        return f"<lambda at {PurePath(fn.__code__.co_filename).name}:{fn.__code__.co_firstlineno}>"
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def identify(fn: Callable[..., Any]) -> tuple[int, ...]:
    """What two functions have in common if and only if they are the same one, whatever their ``==`` says.

    A bound method is made anew at each access, and is told by its function and its owner.
    """
    return (id(fn.__func__), id(fn.__self__)) if isinstance(fn, MethodType) else (id(fn),)
