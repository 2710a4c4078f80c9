"""fit with steps of the user's: one that returns its loss, runs all of it, or works with more than the model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect._core.forecasts import PlannedRegion

pytest.importorskip("scipy")

X = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
Y = torch.arange(256) % 4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


class Holder(nn.Module):
    """Has the model as a part, and more."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.more = net, nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.more(self.net(batch["x"])), batch["y"])}


def steps(model: nn.Module) -> dict[str, tuple[Any, Callable[..., Any]]]:
    holder, judge = Holder(model), nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    def among_others(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(x)
        return logits.detach(), {"total": F.cross_entropy(logits, y)}

    return {
        "returns its loss": ((X, Y), lambda x, y: F.cross_entropy(model(x), y)),
        "returns its loss among others": ((X, Y), among_others),
        "runs all of it": ((X, Y), whole),
        "the model is part of another": ({"x": X, "y": Y}, lambda batch: holder(batch)),
        "another model beside it": (X, lambda x: judge(model(x)).mean()),
    }


@pytest.mark.parametrize("name", steps(nn.Linear(1, 1)))
def test_a_step_is_fitted_with_its_backward_and_the_regions_are_the_models(name: str) -> None:
    model = make()
    batch, step = steps(model)[name]
    seen = recollect.fit(model, batch, step=step, budget="fastest")
    assert seen.plan.forecast is not None
    plain = seen.plan.forecast.plain_peak_bytes
    seen.remove()
    with recollect.fit(model, batch, step=step, budget=int(plain * 0.75)) as fitted:
        assert fitted.plan.forecast is not None
        assert fitted.plan.forecast.measured_peak_bytes is not None
        assert fitted.plan.forecast.measured_peak_bytes <= plain * 0.75
        assert fitted.plan.regions
        assert {region.path.split(".")[0] for region in fitted.plan.regions} <= set("01234")


def test_a_profile_of_a_step_that_returns_its_loss_has_its_backward() -> None:
    model = make()
    for step in (
        lambda: F.cross_entropy(model(X), Y),
        lambda: {"total": F.cross_entropy(model(X), Y), "logits": model(X).detach()},
        lambda: (model(X).detach(), F.cross_entropy(model(X), Y)),
    ):
        for dry in (False, True):
            assert recollect.profile(step, dry=dry).calls[-1].phase.value == "backward"


def test_weights_that_two_modules_share_do_not_keep_a_plan_from_its_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.body, self.head = make()[:4], nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
            self.head[1].weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(self.embed(tokens)))
            return logits

    model = Tied()
    own_bytes = 4 * (16 + 16 + 32)  # a norm and a bias: the weight counts where it is found first
    region = PlannedRegion(path="head", kind="Sequential", way="rerun", parameter_bytes=own_bytes)
    recollect.apply(model, recollect.Plan(regions=(region,))).remove()
    with pytest.raises(ValueError, match="has 256 bytes of parameters in 'head', where the plan saw 255"):
        recollect.apply(model, recollect.Plan(regions=(replace(region, parameter_bytes=255),)))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizers_first_step_counts_the_state_that_later_ones_find(optimizer: Any) -> None:
    model = make()
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    made = optimizer(model.parameters(), lr=1e-3, **options)

    def step() -> None:
        F.cross_entropy(model(X), Y).backward()
        made.step()
        made.zero_grad()

    first = recollect.profile(step, timed=False)
    assert not made.state
    step()
    later = recollect.profile(step, timed=False)
    assert first.peak_bytes == later.peak_bytes


def test_fit_counts_the_state_that_a_step_has_not_made_yet() -> None:
    model = make()
    made = torch.optim.AdamW(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        made.step()
        made.zero_grad()

    budget = recollect.profile(step, X, Y, timed=False).peak_bytes * 8 // 10
    with recollect.fit(model, (X, Y), step=step, budget=budget):
        step(X, Y)
        assert recollect.profile(step, X, Y, timed=False).peak_bytes <= budget


@pytest.mark.parametrize("clears", ["the optimizer's", "the model's", "the optimizer's, to zero"])
def test_fit_counts_gradients_that_a_step_clears_only_before_its_backward(clears: str) -> None:
    """So do many loops: then those of the step before are in memory during forward."""
    model = make()
    made = torch.optim.SGD(model.parameters(), lr=1e-3)
    owner: Any = model if clears == "the model's" else made
    originals = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    def step(x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        owner.zero_grad(set_to_none=clears != "the optimizer's, to zero")
        loss.backward()
        made.step()

    step(X, Y)
    later = recollect.profile(step, X, Y, timed=False).peak_bytes
    model.zero_grad()
    with recollect.fit(model, (X, Y), step=step, budget=later * 8 // 10) as fitted:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert fitted.profile.peak_bytes == later
        step(X, Y)
        assert recollect.profile(step, X, Y, timed=False).peak_bytes <= later * 8 // 10
    assert originals == (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad)


@pytest.mark.parametrize("place", ["first", "last"])
def test_fit_counts_gradients_that_a_step_only_sets_to_zero(place: str) -> None:
    model = make()
    made = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        if place == "first":
            made.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        made.step()
        if place == "last":
            made.zero_grad(False)

    step(X, Y)
    later = recollect.profile(step, X, Y, timed=False).peak_bytes
    model.zero_grad()
    with recollect.fit(model, (X, Y), step=step, budget=later * 8 // 10) as fitted:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert fitted.profile.peak_bytes == later
        step(X, Y)
        assert recollect.profile(step, X, Y, timed=False).peak_bytes <= later * 8 // 10


def test_a_step_that_clears_gradients_first_is_planned_without_any() -> None:
    model = make()
    made = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        made.zero_grad()
        F.cross_entropy(model(x), y).backward()
        made.step()

    first = recollect.profile(step, X, Y, timed=False).peak_bytes
    with recollect.fit(model, (X, Y), step=step, budget=first * 8 // 10) as fitted:
        assert fitted.profile.peak_bytes == first
