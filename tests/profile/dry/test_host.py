"""What the host takes for a call: measured on real tensors, whatever surrounds whoever asks."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recollect
from recollect._core.torch_private.dispatch import fake_class
from recollect._profile.dry import roofline
from recollect._profile.dry.host import TYPICAL, HostCosts, measure_host
from recollect._profile.dry.roofline import find_device, find_host_costs

MEASURED = HostCosts(forward_s=3e-6, backward_s=2e-6)


@pytest.fixture
def h200_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.parametrize(
    "around",
    [FakeTensorMode, lambda: torch.device("meta"), lambda: torch.autocast("cpu"), torch.no_grad],
    ids=["fake tensors", "another device", "autocast", "no gradients"],
)
def test_it_is_measured_whatever_surrounds_the_caller(around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    seen: list[torch.Tensor] = []

    def norm(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    monkeypatch.setattr(nn.LayerNorm, "forward", norm)
    context: AbstractContextManager[Any] = around()
    state = torch.get_rng_state()
    with context:
        costs = measure_host.__wrapped__("cpu")
    assert costs.forward_s > 0
    assert costs.backward_s > 0
    assert {(type(x), x.device.type, x.dtype, x.requires_grad) for x in seen} == {
        (torch.Tensor, "cpu", torch.float32, True)
    }
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("h200_is_here")
def test_a_dry_profile_measures_the_host_before_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = []

    def measure(device: str) -> HostCosts:
        fakes.append((device, fake_class()))
        return MEASURED

    monkeypatch.setattr(roofline, "measure_host", measure)
    seen = recollect.profile(nn.Linear(8, 8), torch.ones(4, 8), dry=True, device="H200")
    assert fakes == [("cuda", None)]
    product = next(call for call in seen.calls if "addmm" in call.op)
    assert product.host_s == MEASURED.forward_s


@pytest.mark.usefixtures("h200_is_here")
def test_without_memory_to_measure_with_a_typical_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: str) -> HostCosts:
        raise torch.OutOfMemoryError(device)

    monkeypatch.setattr(roofline, "measure_host", measure)
    assert find_host_costs(find_device("H200")) == TYPICAL


@pytest.mark.usefixtures("h200_is_here")
def test_devices_that_are_not_here_have_a_typical_host() -> None:
    assert find_host_costs(find_device("A100")) == TYPICAL


def test_a_host_that_runs_calls_itself_takes_nothing_beside() -> None:
    assert find_host_costs(find_device("cpu")) is None


@pytest.mark.gpu
def test_a_dry_profile_of_the_device_that_is_here_is_taken_first_thing() -> None:
    measure_host.cache_clear()
    seen = recollect.profile(nn.Linear(8, 8), torch.ones(4, 8), dry=True, device="cuda")
    assert all(call.host_s is not None and call.host_s > 0 for call in seen.calls if call.flops)
