"""A region under a plan gets its values back the way that the plan counted on."""

import pytest
import torch
from torch import nn

import recollect
from recollect import Choice, Decision, Plan
from recollect._core.forecasts import PlannedRegion

PRODUCTS = Choice(decision=Decision.SAVE, op="aten.addmm.default")
REST = Choice(decision=Decision.RECOMPUTE)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("replay", "by replaying what backward asks for"),
        ("serve", "by running the function again without the operators that are kept; it has no program: the plan"),
    ],
)
def test_a_region_does_what_the_plan_says_though_it_could_do_otherwise(way: str, expected: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU(), nn.Linear(8, 8), nn.Tanh()))
    region = PlannedRegion(path="0", kind="Sequential", way=way, plain_bytes=0, kept_bytes=0)
    handle = recollect.apply(model, Plan(choices=(PRODUCTS, REST), regions=(region,)))
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
    (said,) = [call.way for found in recollect.explain(handle).regions for call in found.calls]
    assert said.startswith(expected)
