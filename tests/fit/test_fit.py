"""fit: in one call from a model to one that stays within a budget, all else as found."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._fit.run import Runner
from recollect._plan.occupancy import Occupancy
from recollect._profile.memory import LiveBytes
from recollect._selective import way
from recollect._selective.knowledge import Learned
from tests.models import GPT

pytest.importorskip("scipy")

TOKENS = torch.randint(0, 32, (4, 32), generator=torch.Generator().manual_seed(0))


def make() -> GPT:
    torch.manual_seed(0)
    return GPT(dropout=0.0)


def find_budget(model: nn.Module, share: float = 0.8) -> int:
    seen = recollect.profile(model, TOKENS)
    return max(int(seen.peak_bytes * share), recollect.plan(seen, budget="min").peak_bytes * 102 // 100)


def test_a_fitted_model_stays_within_its_budget_and_everything_else_is_as_it_was() -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    budget, state = find_budget(model), torch.get_rng_state()
    fitted = recollect.fit(model, TOKENS, budget=budget)
    forecast = fitted.plan.forecast
    assert forecast is not None
    assert forecast.measured_peak_bytes is not None
    assert forecast.measured_peak_bytes <= budget
    assert forecast.measured_step_s
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert "measured peak" in str(fitted)
    assert "<table>" in fitted._repr_html_()
    fitted.remove()
    assert fitted.is_removed
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_it_returns_can_be_explained() -> None:
    model = make()
    fitted = recollect.fit(model, TOKENS, budget="min")
    assert fitted.model is model
    model(TOKENS).sum().backward()
    assert str(recollect.explain(fitted)) == str(recollect.explain(model))
    fitted.remove()


def test_the_first_step_after_it_learns_nothing_more_which_would_take_more_than_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4))
    model, x = nn.Sequential(*blocks), torch.randn(1024, 128)
    budget = recollect.profile(model, x).peak_bytes * 3 // 4
    batches = [(x[:768],), (x,)]
    fitted = recollect.fit(model, batches, budget=budget)
    assert any(region.way != "rerun" for region in fitted.plan.regions), fitted
    monkeypatch.setattr(way, "Asker", pytest.fail)
    for batch in batches:
        with LiveBytes([model, *batch]) as meter:
            model(*batch).sum().backward()
        assert meter.peak_bytes <= budget
        model.zero_grad()


def test_a_step_of_the_users_is_fitted() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor) -> None:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with recollect.fit(model, TOKENS, step=step, budget="min") as fitted:
        assert fitted.plan.regions
        step(TOKENS)


def test_what_cannot_fit_is_refused_and_the_model_stays_plain() -> None:
    model = make()
    with pytest.raises(recollect.BudgetError, match=r"no plan fits 1.00 KiB"):
        recollect.fit(model, TOKENS, budget="1KiB")
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_error_in_the_step_leaves_the_model_plain() -> None:
    model, calls = make(), []

    def step(tokens: Tensor) -> None:
        calls.append(tokens)
        if any("forward" in vars(module) for module in model.modules()):
            message = "not under a plan"
            raise RuntimeError(message)
        model(tokens).sum().backward()

    with pytest.raises(RuntimeError, match="not under a plan"):
        recollect.fit(model, TOKENS, step=step, budget="min")
    assert not any("forward" in vars(module) for module in model.modules())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expects a torch.nn.Module first"):
        recollect.fit(lambda x: x, TOKENS, budget="min")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass either step= or loss="):
        recollect.fit(make(), TOKENS, budget="min", step=print, loss=torch.sum)


def test_before_nothing_is_left_the_plan_with_the_smallest_peak_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    smallest = recollect.plan(recollect.profile(model, TOKENS), budget="min")
    measure, seen = Runner.measure, []

    def mispredict(self: Runner, learned: Learned) -> tuple[int | None, float | None]:
        peak, seconds = measure(self, learned)
        assert peak is not None
        seen.append(peak)
        return (peak * 3 if len(seen) == 1 else peak), seconds

    monkeypatch.setattr(Runner, "measure", mispredict)
    fitted = recollect.fit(model, TOKENS, budget=int(smallest.peak_bytes * 1.1))
    assert fitted.tries == 2
    assert fitted.plan.forecast is not None
    assert fitted.plan.peak_bytes == fitted.plan.forecast.floor_bytes  # of its own profile, whose times are others
    fitted.remove()
    peaks = iter([2 * 10**9, 10**9, 3 * 10**9, 4 * 10**9])
    monkeypatch.setattr(Runner, "measure", lambda _self, _learned: (next(peaks), 1.0))
    text = r"the step took 953\.67 MiB under the best plan that ran, and no plan is tighter"
    with pytest.raises(recollect.BudgetError, match=text):
        recollect.fit(model, TOKENS, budget=int(smallest.peak_bytes * 1.1))
    assert not any("forward" in vars(module) for module in model.modules())


def test_where_the_smallest_peak_is_missed_full_recomputation_is_run_and_the_smaller_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure, seen = Runner.measure, list[int]()

    def mispredict(self: Runner, learned: Learned) -> tuple[int | None, float | None]:
        peak, seconds = measure(self, learned)
        assert peak is not None
        seen.append(peak * (3 if not seen else 1))
        return seen[-1], seconds

    monkeypatch.setattr(Runner, "measure", mispredict)
    with recollect.fit(make(), TOKENS, budget="min") as fitted:
        assert {region.way for region in fitted.plan.regions} == {"rerun"}
        assert not fitted.plan.choices
        assert fitted.plan.forecast is not None
        assert fitted.plan.forecast.measured_peak_bytes == seen[1] < seen[0]


class Penalised(nn.Module):
    """Takes the gradient of its own output on the way: two backward passes go over one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Softplus(), nn.Linear(64, 32)) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = self.layers(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss: Tensor = out.mean() + (grad.norm(dim=-1) - 1).square().mean()
        return loss


def test_the_peak_of_a_step_with_a_gradient_penalty_is_predicted() -> None:
    model, x = Penalised(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    plan = recollect.plan(recollect.profile(model, x), budget="min")
    with recollect.apply(model, plan):
        measured = recollect.profile(model, x).peak_bytes
    assert 0.99 * plan.peak_bytes <= measured <= plan.peak_bytes


def test_if_no_plan_fits_as_predicted_the_step_under_full_recomputation_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Penalised(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    follow = Occupancy.follow
    monkeypatch.setattr(Occupancy, "follow", lambda *args: follow(*args) + 2**16)  # predictions are too high
    smallest = recollect.plan(recollect.profile(model, x), budget="min").peak_bytes
    with recollect.apply(model):
        full = recollect.profile(model, x).peak_bytes
    assert full < smallest
    with recollect.fit(model, x, budget=(full + smallest) // 2) as fitted:
        assert fitted.plan.regions
    with pytest.raises(recollect.BudgetError, match="so full recomputation was run: the step took") as error:
        recollect.fit(model, x, budget=full - 4096)
    assert error.value.smallest_bytes == full
    assert not any("forward" in vars(module) for module in model.modules())


class Dropping(nn.Module):
    """Leaves its second layer out, as layer drop would now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == 1 else x + layer(x)
        return x


def test_layers_that_did_not_run_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with recollect.fit(Dropping(), torch.ones(64, 32), budget="min"):
        pass
    assert "recollect.fit: layers.1 did not run in the profiled step: planned like layers." in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_plain_step_that_does_not_fit_is_profiled_on_fake_tensors(
    error: RuntimeError, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    errors = [error]

    def run_out(*_: Any) -> None:
        if errors:
            raise errors.pop()

    model[2].register_forward_pre_hook(run_out)
    x = torch.randn(64, 16)
    with caplog.at_level("INFO", "recollect"), recollect.fit(model, x, loss=torch.mean, budget="min") as fitted:
        assert fitted.plan.regions
    assert "the plain step does not fit" in caplog.text


def test_a_budget_that_leaves_no_margin_is_met_if_the_step_meets_it() -> None:
    model, x = make(), TOKENS
    smallest = recollect.plan(recollect.profile(model, x), budget="min").peak_bytes
    with recollect.fit(model, x, budget=smallest + 64) as fitted:
        assert fitted.plan.forecast is not None
        assert fitted.plan.forecast.measured_peak_bytes is not None
        assert fitted.plan.forecast.measured_peak_bytes <= smallest + 64


def test_modules_that_are_called_with_packed_sequences_become_regions() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(4))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            for layer in self.layers:
                packed, _ = layer(packed)
            return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]

    with recollect.fit(Tagger(), (torch.ones(8, 32, 16), torch.arange(32, 24, -1)), budget="min") as fitted:
        assert fitted.plan.regions


def test_the_state_that_a_recurrent_model_hands_on_is_none_as_before() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 16)
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden, state = self.cell(x, self.state)
            self.state = state.detach()
            result: Tensor = self.out(hidden)
            return result

    model = Recurrent()
    recollect.fit(model, torch.ones(8, 32, 16), budget="min").remove()
    assert model.state is None
