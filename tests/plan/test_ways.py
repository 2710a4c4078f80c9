"""How the executor will get values back, as a profile shows it: experts that get other tokens at each step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._plan.problem import Problem
from recollect._plan.solvers.keep_sets import find_served_sets
from recollect._plan.ways import can_replay, cuts_by_choice, line_of
from recollect._profile.memory import LiveBytes
from tests.timing import with_fixed_times

pytest.importorskip("scipy")

EXPERTS, WIDTH, TOKENS = 4, 16, 512


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return found


class Routed(nn.Module):
    """A block that sends tokens to experts: those of one to one expert after the other, or all to all of them."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.router, self.experts, self.cut = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(map(make, range(EXPERTS))), cut

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = torch.softmax(self.router(x), -1).max(-1)
        if self.cut == "tolist":
            order = chosen.argsort()
            counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
            parts = [expert(part) for expert, part in zip(self.experts, x[order].split(counts), strict=True)]
            return x + torch.zeros_like(x).index_copy(0, order, torch.cat(parts)) * share[:, None]
        for number, expert in enumerate(self.experts):
            if self.cut == "where":
                own = torch.where(chosen == number)[0]
                x = x.index_add(0, own, expert(x[own]) * share[own, None])
            else:
                x = x + expert(x) * (share * (chosen == number))[:, None]
        return x


def make(_: int) -> Expert:
    return Expert()


def make_model(cut: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Routed(cut) for _ in range(3)))


@pytest.mark.parametrize(("cut", "is_cut"), [("tolist", True), ("where", True), ("mask", False)])
def test_blocks_that_cut_tensors_by_what_they_choose_are_not_replayed(cut: str, *, is_cut: bool) -> None:
    problem = Problem(recollect.profile(make_model(cut), torch.randn(TOKENS, WIDTH), timed=False))
    (run,) = problem.runs_of("0")
    assert cuts_by_choice(problem, run) is is_cut
    assert can_replay(problem, run) is not is_cut


@pytest.mark.parametrize("cut", ["tolist", "where"])
def test_what_one_line_gives_to_all_experts_is_kept_or_nothing_of_it(cut: str) -> None:
    problem = Problem(recollect.profile(make_model(cut), torch.randn(TOKENS, WIDTH), timed=False))
    (run,) = problem.runs_of("0")
    lines = [line_of(problem.calls[number]) for number in range(run.first, run.stop)]
    gelus = {at for at, (op, _, _) in enumerate(lines) if "gelu" in op}
    kept = [{call for call, _ in option.kept} & gelus for option in find_served_sets(problem, run)]
    assert len(gelus) == EXPERTS
    assert all(some in (set(), gelus) for some in kept)
    assert gelus in kept


@pytest.mark.parametrize("cut", ["tolist", "where"])
def test_later_steps_take_no_more_than_was_planned_though_experts_get_other_tokens(cut: str) -> None:
    model = make_model(cut)
    plan = recollect.plan(with_fixed_times(recollect.profile(model, torch.randn(TOKENS, WIDTH))), budget="min")
    with recollect.apply(model, plan):
        for _ in range(6):
            x = torch.randn(TOKENS, WIDTH)
            with LiveBytes(include=[model, x]) as meter:
                loss = model(x).sum()
                loss.backward()
            assert meter.peak_bytes <= 1.01 * plan.peak_bytes
            model.zero_grad()
