"""What regions cost the host is measured where plans are made, and leaves nothing behind."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import recollect
import recollect._fit.overheads as measuring
from recollect._fit.overheads import _FARTHEST, measure_overheads
from recollect._fit.work import work_for
from recollect._plan.overheads import USUAL
from recollect._selective.knowledge import all_knowledge

pytest.importorskip("scipy")


def test_each_way_has_a_price_of_its_own_that_is_near_the_usual_one() -> None:
    known = all_knowledge()
    found = measure_overheads()
    assert found.keys() == USUAL.keys()
    for way, one in found.items():  # however slow the machine
        assert USUAL[way].region_s / _FARTHEST <= one.region_s <= USUAL[way].region_s * _FARTHEST
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
    assert work_for(dry, None).problem.overheads is USUAL
    measured = work_for(real, None).problem.overheads
    assert measured is not USUAL
    assert work_for(real, 1e9).problem.overheads is measured


def test_measuring_warns_of_nothing_where_backward_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.autograd.grad
    with ThreadPoolExecutor(1) as pool:  # as on an accelerator
        monkeypatch.setattr(torch.autograd, "grad", lambda *args: pool.submit(grad, *args).result())
        assert measure_overheads()["replay"] != USUAL["replay"]


def test_regions_are_measured_as_plans_have_them_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool | None] = []

    def watched(step: Callable[..., Any], *, policy: Any) -> Callable[..., Any]:
        seen.append(None if policy is None else policy.replays)
        return step

    monkeypatch.setattr(measuring, "checkpoint", watched)
    measure_overheads()
    assert list(dict.fromkeys(seen)) == [None, False, True]
