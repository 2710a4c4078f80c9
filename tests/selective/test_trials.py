"""A program is tried in the first step: that takes no more memory than backward will."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import recollect
from recollect import policies
from recollect._profile.memory import LiveBytes


def branches(x: Tensor) -> Tensor:
    """Each saves a large result, which nothing else needs, and is summed before the next begins."""
    kept = x.sum().cos()
    return kept + x.exp().sum() + x.sigmoid().sum() + x.tanh().sum()


def test_a_trial_has_let_go_of_one_value_when_it_makes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # Meters do not see trials; here they count.
    monkeypatch.setattr("recollect._selective.learning.without_dispatch_modes", nullcontext)
    region = recollect.checkpoint(branches, policy=policies.save_ops("aten.cos.default"))
    x = torch.rand(64, 64, requires_grad=True)
    peaks = []
    for _ in range(3):
        x.grad = None
        with LiveBytes(include=x) as meter:
            loss = region(x)
            peaks.append(meter.peak_bytes)
            loss.backward()
    assert peaks[0] == peaks[1] == peaks[2]
    assert "recomputed by replaying" in str(recollect.explain(region))
