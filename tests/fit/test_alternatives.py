"""What every budget would give: the plans along the frontier, with their memory over the step."""

import pytest
import torch
from torch.nn import GELU, Linear, Sequential

import recollect
from recollect._core.alternatives import MemoryTrack
from recollect._core.profiles import Profile
from recollect._fit.alternatives import list_alternatives
from tests.timing import with_fixed_times

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def seen() -> Profile:
    model = Sequential(*(Sequential(Linear(32, 128), GELU(), Linear(128, 32)) for _ in range(4)))
    return with_fixed_times(recollect.profile(model, torch.randn(256, 32)))


def test_they_go_from_the_quickest_to_the_smallest(seen: Profile) -> None:
    offered = list_alternatives(seen)
    peaks, times = [one.peak_bytes for one in offered], [one.step_s for one in offered]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    assert peaks[-1] == recollect.plan(seen, budget="min").peak_bytes


def test_each_is_what_a_plan_for_its_peak_promises(seen: Profile) -> None:
    offered = list_alternatives(seen)[-1]
    made = recollect.plan(seen, budget="min")
    assert (offered.peak_bytes, offered.step_s, offered.regions) == (made.peak_bytes, made.step_s, made.regions)


def test_of_very_many_those_stay_that_standard_policies_are_compared_with(
    seen: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recollect._fit.alternatives._MOST", 2)
    forecast = recollect.plan(seen, budget="fastest").forecast
    assert forecast is not None
    assert forecast.policies
    offered = list_alternatives(seen)
    assert len(offered) < len(forecast.curve)
    for policy in forecast.policies:
        ours = next(one for one in offered if one.peak_bytes <= policy.peak_bytes)
        assert ours.step_s <= policy.step_s, policy.name


def test_the_memory_over_the_step_reaches_the_peak_and_ends_with_the_step(seen: Profile) -> None:
    for one in list_alternatives(seen):
        assert max(one.memory.bytes) == one.peak_bytes
        assert one.memory.ends_s[-1] == pytest.approx(one.step_s)
        assert list(one.memory.ends_s) == sorted(one.memory.ends_s)


def test_thousands_of_calls_become_a_few_hundred_stretches_and_no_peak_is_lost() -> None:
    sizes = [1] * 5000
    sizes[1234] = 99
    track = MemoryTrack.of(sizes, [1e-3] * 5000, step_s=5.0)
    assert len(track.bytes) == 400
    assert max(track.bytes) == 99


def test_calls_without_times_share_the_step_evenly() -> None:
    assert MemoryTrack.of([1, 2], [0.0, 0.0], step_s=4.0).ends_s == (2.0, 4.0)
