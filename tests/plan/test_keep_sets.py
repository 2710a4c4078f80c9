"""What to keep of one run: how long it may take to find out."""

from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect._plan.problem import Problem
from recollect._plan.solvers.highs import Model
from recollect._plan.solvers.keep_sets import find_keep_sets

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
