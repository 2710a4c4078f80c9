"""What is worked out of one profile, whatever the budget: the step as a problem, the frontier, the bound, the link."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from recollect._apply.options import has_peers
from recollect._core.errors import OffloadError
from recollect._core.profiles import Clock, Profile
from recollect._core.spelling import choose_words
from recollect._fit.overheads import measured_overheads
from recollect._fit.sending import measured_sending
from recollect._fit.standard import list_standard
from recollect._plan.frontier import Frontier, find_frontier
from recollect._plan.overheads import USUAL, USUAL_ON_DEVICE, Overhead
from recollect._plan.problem import Problem
from recollect._plan.segments import find_chains
from recollect._plan.solvers.bound import LowerBound
from recollect._plan.tiers import DISK, TIERS, read_tiers, spell_tiers
from recollect._plan.ways import cuts_by_choice
from recollect._profile.links import measure_disk, measure_pinned

_MARGIN_DEVICE, _MARGIN_DRY, _MARGIN_HOST = 0.01, 0.03, 0.002
_MARGIN_CUT = 0.01  # experts get more tokens in one step than in another; see docs/fit.md for what that covers
_MARGIN_SENT = 0.005  # copies may fall behind their timetable; within 0.06% of the predicted peak on an H200
_OVERHEADS, _SENDING, _LINK = "overheads", "overheads of sending", "link to"  # what profiles keep that was measured
_PCIE_BYTES_PER_S = 50e9  # generation 5; 25e9 before


class Work:
    """What is worked out of one profile, for all budgets; lives with the profile.

    Args:
        problem: the step.
        here: what is worked out for the same step if nothing is sent away: it holds where something may be, too.
    """

    def __init__(self, problem: Problem, here: Work | None = None) -> None:
        self.problem, self._here = problem, here
        self._frontier: Frontier | None = None

    def frontier(self, progress: Callable[[int, int], None] | None = None) -> Frontier:
        """All that is worth choosing."""
        if self._frontier is None:
            standard = functools.partial(list_standard, self.problem)
            known = None if self._here is None else self._here.frontier(progress)
            self._frontier = find_frontier(self.problem, candidates=standard, known=known, progress=progress)
        return self._frontier

    @functools.cached_property
    def cuts_by_choice(self) -> bool:
        """Whether sizes inside of some block depend on what it chooses: they are others in the next step."""
        chains = find_chains(self.problem)
        return any(cuts_by_choice(self.problem, run) for chain in chains[:1] for one in chain for run in one.runs)

    @functools.cached_property
    def bound(self) -> LowerBound:
        """Tells what no plan that only recomputes can beat."""
        return LowerBound(self.problem)


def _find_overheads(problem: Problem) -> Mapping[str, Overhead]:
    """What regions cost the host: measured here for steps that ran here, else what is usual."""
    profile = problem.plain
    device = "cuda" if profile.clock is Clock.DEVICE else "cpu"
    if not _ran_here(profile):
        return USUAL if problem.prices.plain is None else USUAL_ON_DEVICE
    known = profile.derived.get(_OVERHEADS)
    if not isinstance(known, dict):
        known = profile.derived[_OVERHEADS] = measured_overheads(device, is_autocast=bool(problem.casts))
    return known


def _find_sending(problem: Problem) -> Mapping[str, Overhead]:
    """What regions cost the host, those that send values as well: measured where there is a device to send from."""
    profile = problem.plain
    if profile.clock is Clock.HOST or not _ran_here(profile):
        return problem.overheads
    known = profile.derived.get(_SENDING)
    if not isinstance(known, dict):
        known = profile.derived[_SENDING] = measured_sending("cuda", is_autocast=bool(problem.casts))
    return {**problem.overheads, **known}


def _ran_here(profile: Profile) -> bool:
    is_elsewhere = profile.clock is Clock.DEVICE and not torch.cuda.is_available()
    return bool(profile.modules) and not profile.is_dry and not is_elsewhere


def take_measured(profile: Profile, other: Profile) -> None:
    """What was measured here for another profile of the same model on the same device holds for this one."""
    for name, known in other.derived.items() if profile.is_dry == other.is_dry else ():
        if name in (_OVERHEADS, _SENDING, *(f"{_LINK} {tier}" for tier in TIERS)):
            profile.derived.setdefault(name, known)


def work_for(profile: Profile, link_bytes_per_s: float | None) -> Work:
    """What was worked out of a profile before, or will be; without a link nothing is sent away."""
    key = f"plan {link_bytes_per_s}"
    work = profile.derived.get(key)
    if not isinstance(work, Work):
        if link_bytes_per_s is None:
            problem = Problem(profile)
            problem.overheads = _find_overheads(problem)
            problem.may_join = problem.may_join and not has_peers()
            work = Work(problem)
        else:
            here = work_for(profile, None)
            problem = here.problem.with_link(link_bytes_per_s)
            problem.overheads = _find_sending(problem)
            work = Work(problem, here)
        profile.derived[key] = work
    return work


def find_speed(tiers: str | Sequence[str], profile: Profile, said: float | None) -> float:
    """How fast values go there and back; the slower way counts.

    Raises:
        ValueError: there is no such tier, values are there already, or the speed is none.
        OffloadError: it is the disk, and that cannot be written.
    """
    tier = read_tiers(tiers)
    if tier != DISK and profile.clock is Clock.HOST:
        given = choose_words(f"tiers={tiers!r}", spell_tiers(tiers))
        way_out = choose_words("Pass tiers='disk', or leave tiers out", "Write --tiers disk, or leave --tiers out")
        message = f"{given}: the step already runs in host memory, so moving values there frees nothing.\n{way_out}"
        raise ValueError(message)
    if said is not None:
        if isinstance(said, bool) or not isinstance(said, int | float) or said <= 0:
            message = f"link_bytes_per_s={said!r}: expected a number above 0"
            raise ValueError(message)
        return said
    known = profile.derived.get(f"{_LINK} {tier}")
    if not isinstance(known, float):
        known = profile.derived[f"{_LINK} {tier}"] = _measure_link(tier, profile)
    return known


def _measure_link(tier: str, profile: Profile) -> float:
    if tier == DISK:
        try:
            return min(link.bytes_per_s for link in measure_disk())
        except OSError as error:
            message = (
                f"{choose_words(f'tiers={tier!r}', spell_tiers(tier))}: no file can be written among the temporary "
                f"files, where values would go: {error.strerror or error}.\n"
                "Set TMPDIR to a folder that can be written and has room."
            )
            raise OffloadError(message) from error
    if profile.is_dry or not torch.cuda.is_available():
        return _PCIE_BYTES_PER_S
    return min((link.bytes_per_s for link in measure_pinned(torch.device("cuda"))), default=_PCIE_BYTES_PER_S)


def find_margin_share(profile: Profile, *, sends: bool = False) -> float:
    """How far a plan stays below a budget, as a part of it: for what a profile does not see, of copies above all."""
    more = _MARGIN_SENT if sends and profile.clock is not Clock.HOST else 0.0
    if work_for(profile, None).cuts_by_choice:
        more += _MARGIN_CUT
    if profile.is_dry:
        return _MARGIN_DRY + more
    return (_MARGIN_HOST if profile.clock is Clock.HOST else _MARGIN_DEVICE) + more
