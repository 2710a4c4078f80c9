"""What to keep of one run: how long it may take to find out."""

from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect._plan.problem import Problem
from recollect._plan.solvers.highs import Model
from recollect._plan.solvers.keep_sets import find_keep_sets
from recollect._plan.solvers.program import IntegerProgram

pytest.importorskip("scipy")


@pytest.mark.parametrize(("layers", "is_asked"), [(12, True), (160, False)])
def test_a_long_run_is_not_asked_for_whole_numbers(
    layers: int, *, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of hundreds of calls took a second for each number of bytes, and its blocks are looked at, too."""
    solve, limited = Model.solve, list[bool]()

    def note(self: Model, **options: Any) -> list[float] | None:
        limited.append(options.get("limits") is not None)
        return solve(self, **options)

    monkeypatch.setattr(Model, "solve", note)
    with torch.device("meta"):
        block = (
            nn.Sequential(nn.Linear(1024 + 64 * (at % 3), 1024 + 64 * ((at + 1) % 3)), nn.GELU())
            for at in range(layers)
        )
        stage, given = nn.Sequential(*block), torch.empty(8192, 1024)
    problem = Problem(recollect.profile(nn.Sequential(stage), given, dry=True, device="H100"))
    options = list(find_keep_sets(problem, problem.runs_of("0")[0]))
    assert len(options) > 2
    assert any(limited) is is_asked


class _Ties(nn.Module):
    """Calls of one norm that are made again together, and a result that is written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.silu(self.first(self.norm(x))).mul_(2).add_(1)
        given: torch.Tensor = self.second(inner * torch.sigmoid(inner))
        return x + given.softmax(-1)


@pytest.mark.parametrize("price", [0.0, 1e-14, 1e-13, 1e-12, 1e-11, 1e-10, float("inf")])
def test_a_price_without_other_ties_is_answered_by_a_cut_as_cheap_as_the_program(
    price: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model, given = nn.Sequential(nn.Sequential(*(_Ties() for _ in range(3)))), torch.empty(8192, 64)
    problem = Problem(recollect.profile(model, given, dry=True, device="H100"))
    run = problem.runs_of("0")[0]
    program, slow = IntegerProgram(problem, run), IntegerProgram(problem, run)
    assert program._cut is not None
    slow.__dict__["_cut"] = None
    expected = slow._price(price)
    monkeypatch.setattr(Model, "solve", None)  # nobody asks HiGHS
    found = program._price(price)
    assert found is not None
    assert expected is not None
    byte = min(price, 1.0)
    assert found.seconds + found.bytes * byte == pytest.approx(expected.seconds + expected.bytes * byte, rel=1e-6)
