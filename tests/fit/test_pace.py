"""Plans where the device waits for the host: in all of the step, in forward alone, or never."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import recollect
from recollect import Profile
from recollect._bench.models import GPT
from recollect._core.calls import OpCall
from recollect._core.queues import queue
from recollect._fit import work
from recollect._fit.standard import FULL
from recollect._fit.work import Work, work_for
from recollect._plan import recipes
from recollect._plan.overheads import USUAL, name_overhead
from recollect._plan.prices import Pace
from recollect._plan.rehearse import rehearse
from recollect._plan.treatments import PlannedWay, Treatment, find_held, find_sent
from recollect._plan.ways import find_sendable

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def step() -> Profile:
    with torch.device("meta"):
        model, ids = GPT(768, 4, 12, 512, vocab=256, dropout=0.1).bfloat16(), torch.zeros(256, 512, dtype=torch.long)
    return recollect.profile(model, ids, ids, dry=True, device="H200")


def pace(profile: Profile, host_s: Callable[[OpCall], float]) -> Profile:
    """The step with a host that takes so long for each call."""
    calls = [replace(call, host_s=host_s(call)) for call in profile.calls]
    wall_s = queue([call.host_s or 0.0 for call in calls], [call.device_s or 0.0 for call in calls]).wall_s
    share = wall_s / sum(call.device_s or 0.0 for call in calls)
    return replace(profile, calls=tuple(replace(call, seconds=(call.device_s or 0.0) * share) for call in calls))


def at(profile: Profile, wanted: Pace) -> Profile:
    forward, backward = {Pace.DEVICE: (0, 0), Pace.FORWARD: (2, 0.1), Pace.HOST: (3, 3)}[wanted]
    count = profile.forward_count
    turn = {id(call) for call in profile.calls[:count]}
    device_s = {
        True: sum(call.device_s or 0.0 for call in profile.calls[:count]) / count,
        False: sum(call.device_s or 0.0 for call in profile.calls[count:]) / (len(profile.calls) - count),
    }
    factors = {True: forward, False: backward}
    return pace(profile, lambda call: factors[id(call) in turn] * device_s[id(call) in turn])


def rerun_all(made: Work) -> tuple[float, float]:
    """How long full recomputation takes, and the plain step."""
    runs = [run for number in range(4) for run in made.problem.runs_of(f"layers.{number}")]
    return rehearse(made.problem, [(run, Treatment(way=PlannedWay.RERUN)) for run in runs]).step_s, made.problem.plain_s


@pytest.mark.parametrize("wanted", list(Pace))
def test_the_pace_of_a_step_is_what_it_waits_for(step: Profile, wanted: Pace) -> None:
    assert work_for(at(step, wanted), None).problem.prices.pace is wanted


@pytest.mark.parametrize("wanted", list(Pace))
def test_no_plan_is_slower_than_full_recomputation_at_a_larger_peak(step: Profile, wanted: Pace) -> None:
    frontier = work_for(at(step, wanted), None).frontier()
    full = min((point for point in frontier.candidates if point.name == FULL), key=lambda point: point.peak_bytes)
    assert all(point.step_s <= full.step_s for point in frontier.points if point.peak_bytes >= full.peak_bytes)


def test_what_regions_do_in_forward_counts_where_the_device_waits_there(step: Profile) -> None:
    paced, device = (work_for(at(step, wanted), None) for wanted in (Pace.FORWARD, Pace.DEVICE))
    before = rerun_all(paced), rerun_all(device)
    more_s = 1e-3
    for made in (paced, device):
        rerun = made.problem.overheads["rerun"]
        slower = replace(rerun, region_forward_s=rerun.region_forward_s + more_s)
        made.problem.overheads = {**made.problem.overheads, "rerun": slower}
    after = rerun_all(paced), rerun_all(device)
    assert after[0][0] - before[0][0] == pytest.approx(4 * more_s, rel=0.1)
    assert after[1][0] - before[1][0] < more_s


def send(made: Work, way: PlannedWay) -> tuple[float, int]:
    """How long the step takes if two blocks send something, and how many values they send."""
    problem = made.problem
    runs = [run for number in range(2) for run in problem.runs_of(f"layers.{number}")]
    kept = [frozenset(find_sendable(problem, run, run.needs)) for run in runs]
    chosen = [
        (
            run,
            Treatment(way=way, kept=held, sent=held) if way is PlannedWay.REPLAY else Treatment(way=way, is_away=True),
        )
        for run, held in zip(runs, kept, strict=True)
    ]
    if way is PlannedWay.OFFLOAD:
        count = sum(len(find_sent(problem, [run])) for run in runs)
    elif way is PlannedWay.REPLAY:
        count = sum(map(len, kept))
    else:
        count = sum(len(find_held(problem, *pair)) for pair in chosen)
    return rehearse(problem, chosen).step_s, count


@pytest.mark.parametrize("way", [PlannedWay.OFFLOAD, PlannedWay.RERUN, PlannedWay.REPLAY])
def test_each_value_that_is_sent_costs_the_host_time_in_both_directions(step: Profile, way: PlannedWay) -> None:
    forward_s, backward_s = 1e-4, 3e-4
    for wanted, share in ((Pace.HOST, 1.0), (Pace.DEVICE, 0.0)):
        made = work_for(at(step, wanted), 1e15)
        before_s, count = send(made, way)
        name = name_overhead(way.value, sends=True)
        slower = replace(made.problem.overheads[name], value_forward_s=forward_s, value_backward_s=backward_s)
        usual = made.problem.overheads[name]
        made.problem.overheads = {**made.problem.overheads, name: slower}
        after_s, _ = send(made, way)
        assert count > (1 if way is PlannedWay.RERUN else 8)
        more_s = count * (forward_s + backward_s - usual.value_forward_s - usual.value_backward_s)
        assert after_s - before_s == pytest.approx(share * more_s, rel=0.05, abs=0.1 * more_s)


def test_where_the_host_sets_the_pace_plans_send_nothing_that_costs_it_much(
    step: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    for value_s in (0.0, 5e-3):
        prices = {way: replace(one, value_forward_s=value_s, value_backward_s=value_s) for way, one in USUAL.items()}
        monkeypatch.setattr(work, "USUAL_ON_DEVICE", prices)
        seen = at(step, Pace.HOST)
        held = seen.timeline.held_bytes
        plan = recollect.plan(seen, budget=int(held + 0.7 * (seen.peak_bytes - held)), tiers="host")
        sent.append(sum(region.offloaded_bytes for region in plan.regions))
    assert sent[0] > 0
    assert sent[1] == 0


def test_a_step_that_waits_in_forward_is_planned_to_run_few_blocks_again(
    step: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = USUAL["replay"]
    slow = {**USUAL, "replay": replace(replay, region_forward_s=4e-3)}
    monkeypatch.setattr(work, "USUAL_ON_DEVICE", slow)
    ways: dict[Pace, set[str]] = {}
    for wanted in (Pace.DEVICE, Pace.FORWARD):
        seen = at(step, wanted)
        held = seen.timeline.held_bytes
        plan = recollect.plan(seen, budget=int(held + 0.8 * (seen.peak_bytes - held)))
        ways[wanted] = {region.way for region in plan.regions}
        assert plan.forecast is not None
        assert plan.step_s >= plan.forecast.plain_step_s
    assert ways[Pace.DEVICE] == {"replay"}  # what the host does there, it does beside the device
    assert "rerun" in ways[Pace.FORWARD]


def test_as_many_blocks_are_replayed_as_the_host_can_follow(step: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_s = sum(call.device_s or 0.0 for call in step.calls[: step.forward_count] if "layers." in call.module) / 4
    slow = {**USUAL, "replay": replace(USUAL["replay"], region_forward_s=1.3 * blocks_s)}
    monkeypatch.setattr(work, "USUAL_ON_DEVICE", slow)
    points = work_for(at(step, Pace.DEVICE), None).frontier().points
    followed = [sum(option.way is PlannedWay.REPLAY for _, option in point.choice) for point in points]
    first = followed.index(4)
    assert max(followed[:first]) == 3
    assert followed[first:] == [4] * len(followed[first:])  # the smallest peaks need all, however long that takes
    assert len(followed[first:]) <= 3, followed


def test_planning_leaves_the_pace_as_it_was(step: Profile) -> None:
    made = work_for(at(step, Pace.FORWARD), None)
    made.frontier()
    assert made.problem.prices.pace is Pace.FORWARD


def test_blocks_that_are_made_again_in_two_parts_have_a_smaller_peak(
    step: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = work_for(at(step, Pace.DEVICE), None).frontier().smallest
    monkeypatch.setattr(recipes, "find_waist_sets", lambda *_: iter(()))
    assert least.peak_bytes < work_for(at(step, Pace.DEVICE), None).frontier().smallest.peak_bytes * 0.98
