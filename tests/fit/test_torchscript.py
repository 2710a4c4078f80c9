"""Blocks that call functions of TorchScript run again as a whole, and plans know it: nobody sees the calls inside."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._plan.problem import Problem
from recollect._plan.ways import can_replay

pytest.importorskip("scipy")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is deprecated, and models use it

    @torch.jit.script
    def scale(x: Tensor) -> Tensor:
        return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 2.0)


def scale_in_python(x: Tensor) -> float:
    return math.sqrt(x.size(-1) * 2)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Any:
        hidden = nn.functional.gelu(self.up(x))
        return x + self.down(torch.tanh(hidden / scale_in_python(hidden)))


class Scripted(Plain):
    def forward(self, x: Tensor) -> Any:
        hidden = nn.functional.gelu(self.up(x))
        return x + self.down(torch.tanh(hidden / scale(hidden)))


@pytest.mark.parametrize(("kind", "is_scripted"), [(Plain, False), (Scripted, True)])
@pytest.mark.parametrize("share", [0.85, 0.7])
def test_the_predicted_peak_is_the_measured_one(kind: type[Plain], is_scripted: bool, share: float) -> None:
    model, x = nn.Sequential(*(kind() for _ in range(4))), torch.randn(1024, 16)
    seen = recollect.profile(model, x)
    assert any(call.is_scripted for call in seen.calls) is is_scripted
    problem = Problem(seen)
    assert can_replay(problem, problem.runs_of("0")[0]) is not is_scripted
    plan = recollect.plan(seen, budget=int(seen.peak_bytes * share))
    with recollect.apply(model, plan):
        assert abs(recollect.profile(model, x).peak_bytes - plan.peak_bytes) <= 64  # scalars inside of TorchScript


def test_a_profile_keeps_what_is_scripted_in_its_text() -> None:
    seen = recollect.profile(nn.Sequential(Scripted(), Scripted()), torch.randn(8, 16))
    assert recollect.Profile.from_json(seen.to_json()).calls == seen.calls


def test_a_step_of_scripted_modules_can_be_profiled_dry() -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = nn.Sequential(*(torch.jit.script(block) for block in plain)), torch.randn(64, 16)
    dry = recollect.profile(lambda: model(x).sum(), dry=True)
    assert dry.peak_bytes == recollect.profile(lambda: plain(x).sum(), timed=False).peak_bytes
