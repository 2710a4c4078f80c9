"""fit with levers: what a budget needs beyond recomputing values, shown in the plan, equal up to rounding."""

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect import BudgetError
from recollect._core.levers import PlannedLever
from recollect._fit import work
from recollect._fit.run import Runner
from recollect._levers import lazy_logits
from recollect._levers.lazy_logits import LazyLogits
from recollect._plan.frontier import Frontier, find_frontier
from recollect._plan.overheads import USUAL, Overhead
from recollect._plan.problem import Problem
from tests.models import Block

pytest.importorskip("scipy")

WORDS = 256
TOKENS = torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Blocks, and a head larger than they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Block(16, 0.0) for _ in range(2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lose(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def run(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = lose(model(TOKENS), TOKENS)
    loss.backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return loss.item(), grads


@functools.cache
def find_floor() -> int:
    seen = recollect.profile(Net(), TOKENS, loss=lambda logits: lose(logits, TOKENS))
    return recollect.plan(seen, budget="min").peak_bytes


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


def test_a_chunked_loss_fits_where_no_recomputation_does() -> None:
    model = Net()
    plain, budget = run(model), int(find_floor() * 0.8)
    with pytest.raises(recollect.BudgetError, match=r"`levers=\{'chunked_loss'\}`"):
        recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=budget)
    fitted = recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=budget, levers={"chunked_loss"})
    assert fitted.plan.levers == (PlannedLever(name="chunked_loss", paths=("head",)),)
    assert "lever chunked_loss: head" in str(fitted)
    assert "lever chunked_loss: head" in fitted._repr_html_()
    assert fitted.plan.forecast is not None
    assert (fitted.plan.forecast.measured_peak_bytes or budget + 1) <= budget
    assert isinstance(model(TOKENS), LazyLogits)
    assert_same(run(model), plain)
    model.eval()
    assert isinstance(model(TOKENS), Tensor)
    fitted.remove()
    assert isinstance(model.train()(TOKENS), Tensor)


def test_a_plan_with_levers_is_data_and_can_be_applied_elsewhere() -> None:
    model, other = Net(), Net()
    plain = run(other)
    fitted = recollect.fit(
        model, (TOKENS, TOKENS), loss=lose, budget=int(find_floor() * 0.8), levers={"chunked_loss", "chunked_mlp"}
    )
    again = recollect.Plan.from_json(fitted.plan.to_json())
    assert again == fitted.plan
    with recollect.apply(other, again):
        assert isinstance(other(TOKENS), LazyLogits)
        assert_same(run(other), plain)
    assert "levers: chunked_loss: head -> none" in fitted.plan.diff(recollect.Plan())


def test_parts_of_blocks_run_in_chunks_where_a_chunked_loss_is_not_enough() -> None:
    model = Net()
    plain = run(model)
    seen = recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget="min", levers={"chunked_loss"})
    loss_only = seen.plan.peak_bytes
    seen.remove()
    levers = {"chunked_loss", "chunked_mlp"}
    with recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=int(loss_only * 0.97), levers=levers) as fitted:
        assert [lever.name for lever in fitted.plan.levers] == ["chunked_loss", "chunked_mlp"]
        assert fitted.plan.levers[1].paths == ("layers.0.mlp", "layers.1.mlp")
        assert_same(run(model), plain)


def test_logits_of_which_the_loss_is_only_a_sum_are_computed() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh()) for _ in range(1)), nn.Linear(64, 256))
    with pytest.raises(recollect.BudgetError, match="no plan fits"):  # and not that there is no loss
        recollect.fit(model, torch.randn(64, 16), budget="100KiB", levers={"chunked_loss"})


def test_no_lever_is_used_where_none_is_needed() -> None:
    model = Net()
    with recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget="1GiB", levers={"chunked_loss"}) as fitted:
        assert not fitted.plan.levers
        assert not fitted.plan.regions


def test_micro_batches_come_last_and_their_gradients_add_up() -> None:
    model = Net()
    plain, floor = run(model), find_floor()
    fitted = recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=int(floor * 0.7), levers={"micro_batches"})
    (lever,) = fitted.plan.levers
    assert lever.parts in (2, 4)
    assert "fitted.forward_backward(batch)" in str(fitted)
    model.zero_grad()
    loss = fitted.forward_backward((TOKENS, TOKENS))
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same((loss.item(), grads), plain)
    fitted.remove()
    with pytest.raises(ValueError, match="this fit was removed"):
        fitted.forward_backward((TOKENS, TOKENS))


def test_a_whole_batch_that_was_fitted_in_parts_is_told_how_to_run(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    levers = {"micro_batches": 4}
    with recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=int(find_floor() * 0.7), levers=levers):
        run(model)
    assert "It was fitted to run in micro-batches: fitted.forward_backward(batch) cuts the batch" in caplog.text


def test_what_no_plan_can_reach_is_not_searched_for_at_each_lever(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Problem] = []

    def search(problem: Problem, **options: Any) -> Frontier:
        searched.append(problem)
        return find_frontier(problem, **options)

    monkeypatch.setattr(work, "find_frontier", search)
    with pytest.raises(recollect.BudgetError, match=r"no plan fits 1.00 KiB"):
        recollect.fit(Net(), (TOKENS, TOKENS), loss=lose, budget="1KiB", levers={"chunked_loss", "micro_batches"})
    assert len(searched) == 1  # of the last that was tried, for the refusal


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ((), "'chunked_loss', 'chunked_mlp', 'micro_batches'"),
        (("chunked_mlp",), "'chunked_loss', 'micro_batches'"),
    ],
)
def test_a_refusal_names_the_levers_that_were_not_asked_for_and_can_be_used(asked: tuple[str, ...], named: str) -> None:
    with pytest.raises(recollect.BudgetError) as error:
        recollect.fit(Net(), (TOKENS, TOKENS), loss=lose, budget=int(find_floor() * 0.6), levers=asked)
    assert f"Also possible here: levers={{{named}}}" in str(error.value)


def test_a_refusal_names_no_levers_that_cannot_be_used() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(512, 4)
    floor = recollect.plan(recollect.profile(model, x), budget="min").peak_bytes
    with pytest.raises(recollect.BudgetError) as error:
        recollect.fit(model, x, budget=int(floor * 0.9))
    assert "possible here" not in str(error.value)


def test_micro_batches_of_a_summed_loss_are_not_averaged() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(64, 4)
    expected = model(x).square().sum()
    levers = {"micro_batches": 4}
    plain = recollect.profile(model, x)
    floor = recollect.plan(plain, budget="min").peak_bytes
    fitted = recollect.fit(model, x, loss=lambda out: out.square().sum(), budget=int(floor * 0.8), levers=levers)
    torch.testing.assert_close(fitted.forward_backward(x), expected.detach())


def test_micro_batches_are_refused_where_they_would_change_the_loss() -> None:
    x = torch.randn(64, 4)
    normed = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) normalizes over the whole batch"):
        recollect.fit(normed, x, budget="4KiB", levers={"micro_batches"})
    plain = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    with pytest.raises(ValueError, match="only for a loss that is a mean or a sum over examples"):
        recollect.fit(plain, x, loss=lambda out: out.std(), budget="4KiB", levers={"micro_batches"})
    with pytest.raises(ValueError, match=r"a batch of 64 cannot be cut into 5 equal parts"):
        recollect.fit(plain, x, budget="4KiB", levers={"micro_batches": 5})
    others = torch.arange(64)  # each example's target is itself among all, as for pairs of texts and images
    with pytest.raises(
        ValueError, match=r"fails with a part of it \((IndexError|ValueError): .*\)\. It works only for"
    ):
        recollect.fit(
            plain, x, loss=lambda out: F.cross_entropy(out @ out.T, others), budget="4KiB", levers={"micro_batches"}
        )


def test_a_refusal_does_not_leave_it_at_a_lever_that_was_allowed() -> None:
    def lose_by_hand(logits: Any, targets: Tensor) -> Tensor:
        return F.nll_loss(logits.log_softmax(-1).view(-1, WORDS), targets.view(-1))

    with pytest.raises(BudgetError, match="'chunked_loss' was allowed, and saves nothing in this step: for that, the"):
        recollect.fit(
            Net(), (TOKENS, TOKENS), loss=lose_by_hand, budget=find_floor() * 9 // 10, levers={"chunked_loss"}
        )


def test_parts_with_different_numbers_of_targets_are_refused() -> None:
    model = Net()
    levers = {"micro_batches": 2}
    fitted = recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=int(find_floor() * 0.7), levers=levers)
    uneven = TOKENS.clone()
    uneven[0, :5] = -100
    with pytest.raises(ValueError, match=r"5, 0 targets are -100 \(ignored\) in the parts of this batch"):
        fitted.forward_backward((TOKENS, uneven))


def test_a_step_of_the_users_has_its_own_backward() -> None:
    model = Net()

    def step(tokens: Tensor) -> Tensor:
        return lose(model(tokens), tokens)

    with pytest.raises(
        ValueError, match=r"lever 'micro_batches' works only if recollect.fit runs forward and backward"
    ):
        recollect.fit(model, TOKENS, step=step, budget="min", levers={"micro_batches"})
    seen = recollect.profile(step, TOKENS)
    budget = int(recollect.plan(seen, budget="min").peak_bytes * 0.8)
    with recollect.fit(model, TOKENS, step=step, budget=budget, levers={"chunked_loss"}) as fitted:
        assert fitted.plan.levers
        with pytest.raises(ValueError, match="was given step=, which runs forward and backward: call that"):
            fitted.forward_backward(TOKENS)


def test_levers_that_change_gradients_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    budget = int(find_floor() * 0.8)

    def forget_hidden(hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        return recollect.linear_cross_entropy(hidden.detach(), *args, **options)

    monkeypatch.setattr(lazy_logits, "linear_cross_entropy", forget_hidden)
    with pytest.raises(ValueError, match=r"levers 'chunked_loss' change the gradient of '.*': its norm is .* without"):
        recollect.fit(model, (TOKENS, TOKENS), loss=lose, budget=budget, levers={"chunked_loss"})
    assert isinstance(model(TOKENS), Tensor)


def test_gradients_with_levers_are_compared_without_a_profile_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[bool] = []

    def count(self: Runner, optimizer: Any, **options: Any) -> recollect.Profile:
        profiled.append(options.get("is_timed", True))
        return own(self, optimizer, **options)

    own = Runner._profile
    monkeypatch.setattr(Runner, "_profile", count)
    with recollect.fit(
        Net(), (TOKENS, TOKENS), loss=lose, budget=int(find_floor() * 0.8), levers={"chunked_loss"}
    ) as fitted:
        assert fitted.plan.levers
    assert profiled == [True, True, True]  # plain, with the lever, and under the plan


def test_what_was_measured_for_the_plain_step_holds_with_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    budget = int(find_floor() * 0.8)  # which measures too, if it is the first to ask

    def measure(device: str, *, is_autocast: bool) -> dict[str, Overhead]:
        measured.append(device)
        return dict(USUAL)

    def find_link(tier: str, profile: recollect.Profile) -> float:
        measured.append(tier)
        return 1e9

    monkeypatch.setattr(work, "measured_overheads", measure)
    monkeypatch.setattr(work, "_measure_link", find_link)
    with recollect.fit(
        Net(), (TOKENS, TOKENS), loss=lose, budget=budget, levers={"chunked_loss"}, tiers="disk"
    ) as fitted:
        assert fitted.plan.levers
    assert sorted(measured) == ["cpu", "disk"]


def test_modules_may_be_named_and_are_refused_if_they_cannot_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    given: Any = {"loss": lose, "budget": "8KiB"}
    with pytest.raises(ValueError, match=r"cannot be used on 'layers.0.attn': its result differs by"):
        recollect.fit(model, (TOKENS, TOKENS), levers={"chunked_mlp": "layers.*.attn"}, **given)
    with pytest.raises(ValueError, match=r"pattern 'blocks.\*.mlp' matches no module of Net"):
        recollect.fit(model, (TOKENS, TOKENS), levers={"chunked_mlp": "blocks.*.mlp"}, **given)
    with pytest.raises(
        ValueError, match=r"lever 'chunked_loss' cannot be used on 'embed': its class is Embedding, and not"
    ):
        recollect.fit(model, (TOKENS, TOKENS), levers={"chunked_loss": "embed"}, **given)
    with pytest.raises(
        ValueError, match=r"levers: unknown lever 'magic'; expected one or more of 'chunked_loss', 'chunked_mlp'"
    ):
        recollect.fit(model, (TOKENS, TOKENS), levers={"magic"}, **given)
    small = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))
    with caplog.at_level(logging.INFO, "recollect"), pytest.raises(recollect.BudgetError):
        recollect.fit(small, torch.randn(4, 1, 64), budget="8KiB", levers={"chunked_loss", "chunked_mlp"})
    assert "lever 'chunked_loss' is not used: no torch.nn.Linear runs in forward" in caplog.text
    assert "lever 'chunked_mlp' is not used: no part of a block handles each token on its own" in caplog.text
