"""Steps that run forward and backward several times are planned by the round that takes most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._plan.rounds import find_rounds, take_round
from tests.timing import with_fixed_times

pytest.importorskip("scipy")

Step = Callable[[Tensor], None]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))


def accumulate(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        for part in x.chunk(2):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def lbfgs(model: nn.Module) -> Step:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


def sharpness_aware(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        with torch.no_grad():
            moved = [(one, 0.05 * one.grad) for one in model.parameters() if one.grad is not None]
            for one, by in moved:
                one.add_(by)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for one, by in moved:
                one.sub_(by)
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(
    make: Callable[[nn.Module], Step], x: Tensor, budget: int | None
) -> tuple[list[Tensor], recollect.Plan | None]:
    model = make_model()
    step = make(model)
    fitted = None if budget is None else recollect.fit(model, x, step=step, budget=budget)
    step(x)
    return [parameter.detach() for parameter in model.parameters()], None if fitted is None else fitted.plan


@pytest.mark.parametrize("make", [accumulate, lbfgs, sharpness_aware])
def test_a_step_that_runs_the_model_several_times_is_fitted(make: Callable[[nn.Module], Step]) -> None:
    x = torch.randn(512, 16)
    seen = recollect.profile(make(make_model()), x)
    expected, _ = train(make, x, None)
    found, plan = train(make, x, seen.peak_bytes * 8 // 10)
    assert plan is not None
    assert plan.forecast is not None
    assert plan.regions
    assert plan.forecast.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.002)
    assert plan.forecast.plain_peak_bytes == pytest.approx(seen.peak_bytes, rel=0.002)
    assert all(map(torch.equal, found, expected))


def test_a_round_has_the_peak_of_the_step_and_the_time_of_all_rounds() -> None:
    seen = recollect.profile(accumulate(make_model()), torch.randn(512, 16))
    own = take_round(seen)
    assert len(find_rounds(seen)) == 2
    assert len(find_rounds(own)) == 1
    assert own.peak_bytes == seen.peak_bytes
    assert own.step_s == pytest.approx(seen.step_s)


def test_a_step_with_one_round_is_taken_as_it_is() -> None:
    seen = recollect.profile(make_model(), torch.randn(8, 16))
    assert take_round(seen) is seen


def make_gan() -> tuple[nn.ModuleList, Callable[[Tensor], None]]:
    model = nn.ModuleList([make_model(), make_model()])

    def step(x: Tensor) -> None:
        maker, judge = model
        made = maker(x)
        judge(made.detach()).mean().backward()
        (-judge(made).mean()).backward()

    return model, step


@pytest.mark.parametrize("share", [0.8, 0.6, "min"])
def test_rounds_of_which_a_later_one_needs_what_was_saved_before_are_planned_together(share: float | str) -> None:
    torch.manual_seed(0)
    model, step = make_gan()
    x = torch.randn(512, 16)
    seen = with_fixed_times(recollect.profile(step, x))
    plan = recollect.plan(seen, budget=int(share * seen.peak_bytes) if isinstance(share, float) else share)
    step(x)
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with recollect.apply(model, plan):
        step(x)
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        measured = recollect.profile(step, x).peak_bytes
    assert 0.99 * plan.peak_bytes <= measured <= plan.peak_bytes
    assert plan.peak_bytes < 0.8 * seen.peak_bytes
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_where_a_model_that_is_not_planned_sets_the_peak_it_is_named() -> None:
    model, step = make_gan()
    x = torch.randn(512, 16)
    with pytest.raises(recollect.BudgetError, match=r"is not part of the Sequential that is planned, .*holds both"):
        recollect.fit(model[0], x, step=step, budget=recollect.profile(step, x).peak_bytes // 2)
