"""What options are weighed by: what is there while their own modules run, not while others do."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import recollect

pytest.importorskip("scipy")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return found


class Stack(nn.Module):
    """As T5 does it: what comes before all blocks comes after them once more."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.first = nn.Dropout(0.1)
        self.last = self.first if is_shared else nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(256) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x)
        return found


def plan_stack(*, is_shared: bool) -> list[tuple[int, float]]:
    with torch.device("meta"):
        model, given = Stack(is_shared=is_shared), torch.empty(16384, 256)
    seen = recollect.profile(model, given, dry=True, device="H100")
    plans = [recollect.plan(seen, budget=seen.peak_bytes * share // 100) for share in (45, 60, 75)]
    return [(plan.peak_bytes, plan.step_s) for plan in plans]


def test_a_module_that_runs_before_and_after_all_blocks_does_not_stand_in_the_way_of_their_plans() -> None:
    found = plan_stack(is_shared=True)
    assert found == plan_stack(is_shared=False)
    assert all(tighter > wider for (_, tighter), (_, wider) in pairwise(found))
