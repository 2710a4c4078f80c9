"""Plans for steps under autocast: what they promise of memory holds, whatever they choose."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._plan.overheads import USUAL, Overhead
from tests.timing import with_fixed_times

pytest.importorskip("scipy")


class Attends(nn.Module):
    """Queries, keys and values each cast what they are given; the projections read one norm each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query, self.key, self.value = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.out, self.up, self.down = nn.Linear(size, size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.after(x))))
        return found


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("kind", ["written out", "of torch"])
def test_every_budget_is_met_nearly_to_the_byte_that_was_promised(kind: str, *, is_free: bool) -> None:
    """Where regions cost the host nothing, replays are worth it that hold casts of weights."""
    torch.manual_seed(0)
    make = (
        (lambda: Attends(32))
        if kind == "written out"
        else (lambda: nn.TransformerEncoderLayer(32, 2, 128, batch_first=True, dropout=0.0))
    )
    model, x = nn.Sequential(*(make() for _ in range(3))), torch.randn(8, 16, 32)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        step()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return found

    expected = gradients()
    seen = with_fixed_times(recollect.profile(step))
    if is_free:
        nothing = Overhead(region_forward_s=0.0, call_forward_s=0.0, region_backward_s=0.0)
        seen.derived["overheads"] = dict.fromkeys(USUAL, nothing)
    smallest = recollect.plan(seen, budget="min").peak_bytes
    budgets = {smallest + (seen.peak_bytes - smallest) * part // 8 for part in range(1, 8)}
    tried, holding = set(), set[bool]()
    goals: list[int | str] = ["min", *sorted(budgets)]
    for budget in goals:
        plan = recollect.plan(seen, budget=budget)
        holds = tuple(region.keeps_casts for region in plan.regions)
        if (plan.choices, holds) in tried:
            continue
        tried.add((plan.choices, holds))
        holding.update(holds)
        with recollect.apply(model, recollect.Plan.from_json(plan.to_json())):
            for _ in range(2):
                assert all(map(torch.equal, gradients(), expected))
            assert 0.99 <= recollect.profile(step).peak_bytes / plan.peak_bytes <= 1.002
        model.zero_grad()
    assert not is_free or True in holding
