"""Profiles whose times are those of one machine, wherever they were taken: plans depend on them."""

from dataclasses import replace

from recollect import Profile
from recollect._core.calls import OpCall
from recollect._plan.overheads import USUAL

_CALL_S, _BYTES_PER_S, _FLOPS_PER_S = 2e-6, 1e10, 5e10


def with_fixed_times(profile: Profile) -> Profile:
    """The profile of a step that ran here, timed as on a machine that is always the same, with its usual overheads."""
    calls = tuple(replace(call, seconds=_time(call), device_s=_time(call)) for call in profile.calls)
    under = profile.under_regions
    found = replace(profile, calls=calls, under_regions=None if under is None else with_fixed_times(under))
    found.derived["overheads"] = dict(USUAL)
    return found


def _time(call: OpCall) -> float:
    given = {value.storage for value in call.inputs}
    made = sum(value.bytes for value in call.outputs if value.storage not in given)
    if not made and not call.writes:
        return 0.0  # a view
    return _CALL_S + (sum(value.bytes for value in call.inputs) + made) / _BYTES_PER_S + call.flops / _FLOPS_PER_S
