"""Steps that are to fit are run and measured; their optimizer is followed once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect._fit.batches import read_batch, read_step
from recollect._fit.run import Runner
from recollect._profile import optimizer as shadows

X = torch.ones(64, 32)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    own: Callable[..., None] = shadows.Shadow.step

    def step(shadow: shadows.Shadow, *args: Any) -> None:
        names.append(shadow.name)
        own(shadow, *args)

    monkeypatch.setattr(shadows.Shadow, "step", step)
    return names


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("width", [32, 2048])
def test_the_optimizer_counts_in_every_measured_step_and_is_followed_once(
    followed: list[str], has_state: bool, width: int
) -> None:
    model = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))  # its peak is in backward, or after it
    optimizer = torch.optim.AdamW(model.parameters())
    if has_state:
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    runner = Runner(model, read_batch(X, None, model), optimizer)
    plain = runner.profile_plainly()
    assert followed == ["AdamW"]
    peak, seconds = runner.measure()
    assert peak == plain.peak_bytes
    assert seconds is not None
    stepping = [call for call in plain.calls if call.phase.value == "optimizer"]
    assert seconds > sum(call.seconds or 0.0 for call in stepping) > 0
    assert followed == ["AdamW"]


def test_a_step_that_calls_its_optimizer_is_measured_with_it() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    runner = Runner(model, read_step(X, step), None)
    plain = runner.profile_plainly()
    assert runner.measure()[0] == plain.peak_bytes


def test_a_plan_is_measured_as_a_profile_with_the_optimizer_would_measure_it() -> None:
    model = make_model()
    runner = Runner(model, read_batch(X, None, model), torch.optim.SGD)
    runner.profile_plainly()
    with recollect.apply(model, {"0": "full", "1": "full"}):
        seen = recollect.profile(model, X, optimizer=torch.optim.SGD)
        assert runner.measure()[0] == seen.peak_bytes
