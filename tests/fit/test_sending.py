"""What sending values costs the host is measured where plans are made on a device, and leaves nothing behind."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import recollect
import recollect._fit.sending as measuring
from recollect._core.profiles import Clock
from recollect._fit import work
from recollect._fit.overheads import _FARTHEST, CALLS, Times
from recollect._fit.sending import measure_sending, measured_sending
from recollect._fit.work import work_for
from recollect._offload.offload import Offload, measuring_offloads
from recollect._offload.session import Session
from recollect._offload.tiers import shared_hosts
from recollect._plan.overheads import USUAL, Overhead
from recollect._selective.knowledge import all_knowledge
from tests.offload.late_lanes import late_session

pytest.importorskip("scipy")

SENDING = {"offload", "rerun, sending", "serve, sending", "replay, sending"}
SHAPE = (1, 4, 8)


def measure(sessions: list[Session]) -> dict[str, Overhead]:
    """What is found with a link of tests, on which small values travel, too."""

    def make_away(min_bytes: int) -> Offload:
        sessions.append(late_session(min_bytes=min_bytes // 2**16)[0])
        return Offload(sessions[-1])

    return measure_sending(USUAL, "cpu", is_autocast=False, make_away=make_away, shape=SHAPE)


def test_ways_that_send_have_prices_of_their_own_near_the_usual_ones() -> None:
    known, sessions, state = all_knowledge(), list[Session](), torch.get_rng_state()
    with torch.no_grad():
        found = measure(sessions)
        assert not torch.is_grad_enabled()
    assert found.keys() == SENDING
    for way, one in found.items():  # however slow the machine
        usual = USUAL[way]
        assert one != usual
        for mine, theirs in (
            (one.forward_s(30, values=8), usual.forward_s(30, values=8)),
            (one.backward_s(30, 20, values=8), usual.backward_s(30, 20, values=8)),
        ):
            assert theirs / _FARTHEST <= mine <= theirs * _FARTHEST
    assert len({(one.value_forward_s, one.value_backward_s) for one in found.values()}) == 1
    assert torch.equal(state, torch.get_rng_state())
    assert set(all_knowledge()) <= set(known)
    values = [session.report().values for session in sessions]
    assert values[0] == 0  # the first has hooks, and sends nothing
    assert all(values[1:])


def test_what_is_measured_as_usual_is_what_is_usual() -> None:
    plain = Times(forward_s=1.0, backward_s=2.0)
    sent = {"offload": 10, "rerun, sending": 2, "replay, sending": 4, "serve, sending": 6}

    def take(way: str, again_s: float, values: int) -> Times:
        one, calls, regions = USUAL[way], CALLS, measuring._REGIONS
        own = regions * one.forward_s(calls) + values * one.value_forward_s
        back = regions * one.backward_s(calls, calls) + values * one.value_backward_s
        return Times(forward_s=plain.forward_s + own, backward_s=plain.backward_s + again_s + back)

    times = {
        "plain": plain,
        "offload of nothing": take("offload", 0.0, 0),
        "offload": take("offload", 0.0, sent["offload"]),
        "rerun": take("rerun", plain.forward_s, 0),
        "rerun, sending": take("rerun, sending", plain.forward_s, sent["rerun, sending"]),
        "replay": take("replay", 0.0, 0),
        "replay, sending": take("replay, sending", 0.0, sent["replay, sending"]),
        "serve, sending": take("serve, sending", plain.forward_s, sent["serve, sending"]),
    }
    for way, found in measuring._read(USUAL, times, sent).items():
        for field in Overhead.__dataclass_fields__:
            assert getattr(found, field) == pytest.approx(getattr(USUAL[way], field))


def test_only_steps_that_ran_on_a_device_have_their_sending_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measure(device: str, *, is_autocast: bool) -> dict[str, Overhead]:
        assert device == "cuda"
        asked.append(is_autocast)
        return {"offload": Overhead(region_forward_s=1.0, call_forward_s=0.0, region_backward_s=0.0)}

    monkeypatch.setattr(work, "measured_sending", measure)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    here, dry = recollect.profile(model, x), recollect.profile(model, x, dry=True, device="H200")
    for seen in (here, dry):
        assert work_for(seen, 1e9).problem.overheads is work_for(seen, None).problem.overheads
    assert not asked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = replace(here, clock=Clock.DEVICE)
    problem = work_for(there, 1e9).problem
    assert problem.overheads["offload"].region_forward_s == 1.0
    assert work_for(there, None).problem.overheads["offload"] == USUAL["offload"]
    work_for(there, 2e9)
    assert asked == [False]


def test_pinned_memory_for_measuring_goes_back() -> None:
    with measuring_offloads() as make_away:
        host = make_away(0)._session.transfers.host
        assert host is not None
        piece = host.pool.take(2**20)
        assert piece is not None
        assert host.pool.held_bytes
        piece.give_back()
        del piece
    assert host.pool.held_bytes == 0
    assert host is not shared_hosts.get(None)


def test_a_device_without_room_is_priced_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measuring, "measure_sending", fail)
    monkeypatch.setattr(measuring, "measured_overheads", lambda *_, **__: USUAL)
    measured_sending.cache_clear()
    try:
        assert measured_sending("cpu", is_autocast=False) == {}
    finally:
        measured_sending.cache_clear()
