"""The largest that fits: a search over profiles for the batch size, the context length, or any other whole number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recollect._core.profiles import Profile
from recollect._fit.standard import list_standard
from recollect._fit.work import Work, find_margin_share, find_speed, work_for
from recollect._plan.frontier import Point
from recollect._plan.rehearse import rehearse
from recollect._plan.segments import find_chains

PLAIN, FULL, PLANNED = "plain", "full recomputation", "plan"
_POLICIES = "the best standard policy"
_TOLERANCE = 200  # how many times the uncertainty the value is at least
_LEAP = 16
_MOST = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """How large a step may be.

    Attributes:
        way: how it runs: plain, with every block recomputed, or under the best plan.
        value: the largest that fits; 0 if none does.
        peak_bytes: what it takes then.
        step_s: how long it takes then, as the profile says.
    """

    way: str
    value: int
    peak_bytes: int = 0
    step_s: float = 0.0


class Sizes:
    """A step at different sizes, each profiled once.

    Args:
        profile_at: gives the profile of the plain step at a size.
        budget_bytes: the most that a step may take.
        tiers: as of `recollect.plan`.
        known: profiles that are there already, by their sizes.
    """

    def __init__(
        self,
        profile_at: Callable[[int], Profile],
        budget_bytes: int,
        *,
        tiers: str | Sequence[str] | None = None,
        known: Mapping[int, Profile] | None = None,
    ) -> None:
        self._profile_at, self._budget_bytes, self._tiers = profile_at, budget_bytes, tiers
        self._profiles: dict[int, Profile] = dict(known or {})
        self._policies: dict[int, dict[str, tuple[int, float]]] = {}

    def profile(self, value: int) -> Profile:
        """The plain step at a size."""
        if value not in self._profiles:
            self._profiles[value] = self._profile_at(value)
        return self._profiles[value]

    def find_largest(self, way: str, *, start: int = 1, multiple_of: int = 1) -> Largest:
        """The largest size at which the step fits, exact as `search_largest` is.

        Peaks are taken to grow with the size. Standard policies, which are judged quickly, say where to look for plans.

        Args:
            way: `PLAIN`, `FULL` or `PLANNED`.
            start: where to begin.
            multiple_of: only multiples of this are looked at.
        """
        value = self._search(way, start, multiple_of)
        if not value:
            return Largest(way=way, value=0)
        peak_bytes, step_s = self._measure(way, value)
        return Largest(way=way, value=value, peak_bytes=peak_bytes, step_s=step_s)

    def _search(self, way: str, start: int, multiple_of: int) -> int:
        def excess(count: int, of: str = way) -> int:
            value = count * multiple_of
            return self._measure(of, value)[0] - self._limit(value)

        counts = [value // multiple_of for value in self._profiles if value % multiple_of == 0]
        if way != PLANNED:  # quick, where there is a profile
            known = {count: excess(count) for count in counts}
        else:
            near = self._search(_POLICIES, start, multiple_of) // multiple_of
            small = [count for count in counts if count < near][:1]  # where the plan need not be the best
            known = {**{count: excess(count, _POLICIES) for count in small}, near: excess(near)} if near else {}
        return multiple_of * search_largest(excess, start=max(1, start // multiple_of), known=known)

    def _limit(self, value: int) -> int:
        return int(self._budget_bytes * (1 - find_margin_share(self.profile(value))))

    def _measure(self, way: str, value: int) -> tuple[int, float]:
        """Peak and time of a step: of a plan the quickest that fits, or the smallest."""
        profile = self.profile(value)
        if way == PLAIN:
            return profile.peak_bytes, profile.step_s or 0.0
        work = work_for(profile, None if self._tiers is None else find_speed(self._tiers, profile, None))
        if way != PLANNED:
            policies = self._judge_policies(value, work)
            return policies["full"] if way == FULL else min(policies.values())
        frontier = work.frontier()
        point: Point = frontier.fastest_within(self._limit(value)) or frontier.smallest
        return point.peak_bytes, point.step_s

    def _judge_policies(self, value: int, work: Work) -> dict[str, tuple[int, float]]:
        """What standard policies take, by their names."""
        if value not in self._policies:
            problem, found = work.problem, {}
            chains = find_chains(problem)
            for name, choice in list_standard(problem, chains[0]) if chains else ():
                treated = [pair for segment, option in choice for pair in option.treat(problem, segment)]
                judged = rehearse(problem, treated)
                found[name] = judged.peak_bytes, judged.step_s
            self._policies[value] = found or {"full": (problem.profile.peak_bytes, problem.plain_s)}
        return self._policies[value]


def search_largest(excess: Callable[[int], int], *, start: int = 1, known: Mapping[int, int] | None = None) -> int:
    """The largest whole number from 1 whose excess is not above 0, for an excess that grows; 0 if there is none.

    Exact below 200, else within half a percent. Each try is where a line through two others crosses 0, which finds what
    grows nearly evenly in about five; where that comes from one side only, the middle is tried.

    Args:
        excess: of a number; asked once for each.
        start: where to begin, if nothing is known.
        known: the excess of some numbers.

    >>> asked = []
    >>> search_largest(lambda number: asked.append(number) or 3 * number - 1000, start=8), len(asked)
    (333, 5)
    """
    found = dict(known or {})
    low = max((number for number, over in found.items() if over <= 0), default=0)
    high = min((number for number, over in found.items() if over > 0 and number > low), default=_MOST)
    sides = [False, True]
    guess = _cross(found, low, high) if found else start
    while high - low > max(1, low // _TOLERANCE):
        found[guess] = excess(guess)
        fits = found[guess] <= 0
        low, high = (guess, high) if fits else (low, guess)
        sides.append(fits)
        is_one_sided = low > 0 and high < _MOST and len(set(sides[-3:])) == 1
        guess = (low + high) // 2 if is_one_sided else _cross(found, low, high)
    return low


def _cross(known: dict[int, int], low: int, high: int) -> int:
    """Where a line crosses 0: through both ends of the bracket, or through the two nearest to an end that is open."""
    numbers = sorted(known)
    if len(numbers) == 1:
        return 2 * low if low else max(1, high // 2)
    is_open = not low or high == _MOST
    one, other = (numbers[-2:] if low else numbers[:2]) if is_open else (low, high)
    slope = (known[other] - known[one]) / (other - one)
    line = int(one - known[one] / slope) if slope > 0 else (low + high) // 2
    width = max(1, low // _TOLERANCE)  # a try beside the crossing closes the bracket
    if not low:
        return min(max(line, 1), max(1, high // 2))
    if high == _MOST:
        return min(max(line, low + width), low * _LEAP)
    return min(max(line, low + width), max(high - width, low + 1))
