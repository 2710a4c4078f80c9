"""Questions about a site that can be written as comparisons: ``flops_per_byte > 100``."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.decisions import Site
from recollect._policy.base import identify, name_function, takes

_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Predicate(ABC):
    """A question about a site, answered by yes or no; two are joined by ``&`` or ``|``."""

    @abstractmethod
    def __call__(self, site: Site) -> bool:
        """The answer for a site."""

    def __and__(self, other: Predicate) -> Predicate:
        return Compound(self, "&", other) if isinstance(other, Predicate) else NotImplemented

    def __or__(self, other: Predicate) -> Predicate:
        return Compound(self, "|", other) if isinstance(other, Predicate) else NotImplemented

    def __bool__(self) -> NoReturn:
        # `and`, `or`, `not` and chained comparisons would silently drop one side.
        message = (
            f"'{self}' is a condition on sites, neither true nor false by itself.\n"
            "Join two with & or |, each in parentheses: (flops > 1e6) & (nbytes < 1024); for anything else write a "
            "function of a site."
        )
        raise TypeError(message)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Predicate):
    """A number of the site against a bound."""

    attribute: str
    word: str
    sign: str
    bound: float

    def __call__(self, site: Site) -> bool:
        """Compare."""
        return _SIGNS[self.sign](getattr(site, self.attribute), self.bound)

    def __repr__(self) -> str:
        return f"{self.word} {self.sign} {self.bound}"


@dataclass(frozen=True, slots=True, repr=False)
class Compound(Predicate):
    """Two predicates, both (``&``) or at least one (``|``) of which hold."""

    left: Predicate
    sign: str
    right: Predicate

    def __call__(self, site: Site) -> bool:
        """Ask the left one, then the right one if that can still matter."""
        if self.sign == "&":
            return self.left(site) and self.right(site)
        return self.left(site) or self.right(site)

    def __repr__(self) -> str:
        return f"({self.left}) {self.sign} ({self.right})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FunctionPredicate(Predicate):
    """A user's own function. Two are the same if their functions are one object."""

    fn: Callable[[Site], bool]

    def __call__(self, site: Site) -> bool:
        """What the function says.

        Raises:
            TypeError: it says something else than True or False.
        """
        answer = self.fn(site)
        if not isinstance(answer, bool):
            message = (
                f"predicate {self} answered {answer!r} for {site.op} in region {site.region!r}, which is neither True "
                "nor False.\n"
                "A function that returns a recollect.Decision is a policy by itself and needs no save_if."
            )
            raise TypeError(message)
        return answer

    def __repr__(self) -> str:
        return name_function(self.fn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionPredicate) and identify(self.fn) == identify(other.fn)

    def __hash__(self) -> int:
        return hash(identify(self.fn))


class Field:
    """A number of a site, to compare with a bound, as in ``save_if(flops_per_byte > 100)``.

    `flops`: of the operator's call. `nbytes`: of the value. `flops_per_byte`: what recomputing the value costs for each
    byte that it frees.
    """

    __slots__ = ("_attribute", "_word")

    def __init__(self, word: str, attribute: str) -> None:
        self._word = word
        self._attribute = attribute

    def __gt__(self, bound: float) -> Predicate:
        return self._compare(">", bound)

    def __ge__(self, bound: float) -> Predicate:
        return self._compare(">=", bound)

    def __lt__(self, bound: float) -> Predicate:
        return self._compare("<", bound)

    def __le__(self, bound: float) -> Predicate:
        return self._compare("<=", bound)

    def __repr__(self) -> str:
        return self._word

    def _compare(self, sign: str, bound: float) -> Predicate:
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            message = f"{self} {sign} {short_repr(bound)}: expected a number"
            message += ", as in nbytes > 2**20; for anything else, pass save_if a function of a site"
            raise TypeError(message)
        return Comparison(self._attribute, self._word, sign, bound)


flops = Field("flops", "flops")
"""Floating-point operations of the whole operator call."""

nbytes = Field("nbytes", "bytes")
"""Bytes of the value."""

flops_per_byte = Field("flops_per_byte", "flops_per_byte")
"""What recomputing costs for each byte that it frees."""


def as_predicate(predicate: Callable[[Site], bool]) -> Predicate:
    """A comparison as it is, a function wrapped.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(predicate, Predicate):
        return predicate
    if isinstance(predicate, Field):
        message = f"save_if({predicate}): a measure is not a condition; compare it with a bound: {predicate} > 100"
        raise TypeError(message)
    if not callable(predicate):
        message = "save_if expects a comparison such as flops_per_byte > 100, or a function from a recollect.Site to "
        message += f"True or False; not {describe_argument(predicate)}"
        raise TypeError(message)
    if not takes(predicate, 1):
        message = f"predicate {name_function(predicate)} cannot be called with one argument: save_if passes it a "
        message += "recollect.Site, and expects True or False"
        raise TypeError(message)
    return FunctionPredicate(predicate)
