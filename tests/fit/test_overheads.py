"""What regions cost the host is measured where plans are made, and leaves nothing behind."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import recollect
import recollect._fit.overheads as measuring
from recollect._core.authors import Role
from recollect._fit.overheads import _FARTHEST, measure_overheads, measured_overheads
from recollect._fit.work import work_for
from recollect._plan.overheads import USUAL, USUAL_ON_DEVICE, Overhead
from recollect._plan.problem import Problem
from recollect._plan.treatments import Treatment, find_recomputed
from recollect._plan.ways import find_held_for
from recollect._selective.knowledge import all_knowledge

pytest.importorskip("scipy")


def test_each_way_has_a_price_of_its_own_that_is_near_the_usual_one() -> None:
    known = all_knowledge()
    found = measure_overheads()
    assert found.keys() == USUAL.keys()
    for way, one in found.items():  # however slow the machine
        usual = USUAL[way]
        assert usual.forward_s(30, 2) / _FARTHEST <= one.forward_s(30, 2) <= usual.forward_s(30, 2) * _FARTHEST
        assert one.backward_s(30, 20, 2) <= usual.backward_s(30, 20, 2) * _FARTHEST
    assert found["replay"] != USUAL["replay"]
    assert set(all_knowledge()) <= set(known)  # of functions that are gone nothing is known any more


def test_measuring_leaves_generators_modes_and_gradients_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.no_grad():
        measure_overheads()
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_steps_that_ran_here_are_priced_as_measured_and_dry_ones_as_usual() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    real, dry = recollect.profile(model, x), recollect.profile(model, x, dry=True, device="H200")
    assert work_for(dry, None).problem.overheads is USUAL_ON_DEVICE
    measured = work_for(real, None).problem.overheads
    assert measured is not USUAL
    assert work_for(real, 1e9).problem.overheads is measured


def test_draws_of_a_device_that_is_not_here_are_priced_as_those_of_its_generator() -> None:
    model, given = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))), torch.empty(4, 8)
    on_host, on_device = (
        work_for(recollect.profile(model, given, dry=True, device=device), None).problem.overheads["replay"]
        for device in ("cpu", "H100")
    )
    assert on_device.forward_s(20) == on_host.forward_s(20)
    assert on_device.forward_s(20, draws=3) < on_host.forward_s(20, draws=3)
    assert on_device.backward_s(20, again=5, draws=3) < on_host.backward_s(20, again=5, draws=3)


def test_measuring_warns_of_nothing_where_backward_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.autograd.grad
    with ThreadPoolExecutor(1) as pool:  # as on an accelerator
        monkeypatch.setattr(torch.autograd, "grad", lambda *args: pool.submit(grad, *args).result())
        assert measure_overheads()["replay"] != USUAL["replay"]


def test_a_process_measures_once_for_each_device_with_autocast_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, bool]] = []

    def measure(device: str, *, is_autocast: bool) -> dict[str, Overhead]:
        measured.append((device, is_autocast))
        return dict(USUAL)

    monkeypatch.setattr(measuring, "measure_overheads", measure)
    measured_overheads.cache_clear()
    try:
        for is_autocast in (False, True, False, True):
            measured_overheads("cpu", is_autocast=is_autocast)
    finally:
        measured_overheads.cache_clear()
    assert measured == [("cpu", False), ("cpu", True)]


def test_a_busy_machine_is_measured_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[nn.Module] = []

    def count(model: nn.Module, *args: Any, **options: Any) -> Any:
        timed.append(model)
        return own(model, *args, **options)

    own = measuring.time_once
    monkeypatch.setattr(measuring, "time_once", count)
    monkeypatch.setattr(measuring, "_LONG_S", float("inf"))
    measure_overheads()
    usually = len(timed)
    timed.clear()
    monkeypatch.setattr(measuring, "_LONG_S", 0.0)
    measure_overheads()
    assert len(timed) == len(dict.fromkeys(timed)) * (measuring._WARM + measuring._REPEATS) < usually


def test_regions_are_measured_as_plans_have_them_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool | None] = []

    def watched(model: nn.Module, rules: dict[str, Any]) -> AbstractContextManager[None]:
        [policy] = rules.values()
        assert isinstance(model[0], nn.Sequential)  # type: ignore[index]
        seen.append(None if policy == "full" else policy.replays)
        return nullcontext()

    monkeypatch.setattr(measuring, "apply", watched)
    measure_overheads()
    assert list(dict.fromkeys(seen)) == [None, False, True]


@pytest.mark.parametrize(("size", "kept", "again"), [(1, 1, 6), (3, 1, 22), (3, 4, 6)])
def test_the_calls_are_as_many_as_are_counted(
    size: int, kept: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "__recollect_role__", Role.PROGRAM, raising=False)
    ops = (measuring.NORMS, *measuring._OTHERS)[:kept]
    model = nn.Sequential(nn.Sequential(*(measuring.Layer(8) for _ in range(size))))
    problem = Problem(recollect.profile(model, torch.ones(1, 4, 8, requires_grad=True)))
    [run] = problem.runs_of("0")
    assert problem.count_torch_calls(range(run.first, run.stop)) == size * measuring.CALLS
    calls = {number for number in range(run.first, run.stop) if problem.calls[number].op in ops}
    way, held = find_held_for(problem, run, calls)
    made = find_recomputed(problem, run, Treatment(way=way, kept=held))
    assert problem.count_torch_calls(call for _, some in made for call in some) == again
