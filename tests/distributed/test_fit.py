"""fit among several processes: one plan for all of a model, made by the first and agreed on; one for each stage."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect._core.calls import Category
from recollect._core.levers import PlannedLever
from recollect._fit.ranks import Ranks as Peers
from tests.distributed.launch import Ranks

WIDTH = 16


def make(engine: str, depth: int = 4) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(depth))
    )
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine == "fsdp2":
        for layer in net:
            fully_shard(layer)
        return fully_shard(net)
    return net


def batch(rows: int = 256) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(distributed.get_rank()))


def lose(output: Tensor) -> Tensor:
    return output.square().mean()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    lose(model(x)).backward()
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    found = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    model.zero_grad()
    return found


def fit_together(engine: str, share: float) -> tuple[str, int, int, int]:
    model, x = make(engine), batch()
    expected = step(model, x)
    seen = recollect.profile(model, x, loss=lose, optimizer=torch.optim.AdamW)
    assert any(call.is_collective for call in seen.calls)
    budgets: list[Any] = [int(seen.peak_bytes * share)]
    distributed.broadcast_object_list(budgets)
    with recollect.fit(model, x, loss=lose, optimizer=torch.optim.AdamW, budget=budgets[0]) as fitted:
        found = step(model, x)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        forecast = fitted.plan.forecast
        assert forecast is not None
        assert forecast.measured_peak_bytes is not None
        assert forecast.measured_peak_bytes <= (forecast.budget_bytes or 0)
        assert fitted.plan.regions
        kinds = {storage.category for storage in fitted.profile.storages}
        assert Category.OPTIMIZER in kinds
        return fitted.plan.digest, forecast.measured_peak_bytes, forecast.peak_bytes, fitted.tries


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_all_ranks_have_the_plan_of_the_first_and_stay_within_the_budget(ranks: Ranks, engine: str) -> None:
    first, second = ranks.run(fit_together, engine, 0.8)
    assert first == second


def fit_stages() -> tuple[list[str], bool]:
    """Each rank has a stage of its own: one of few blocks, one of many; the budget is for each."""
    model = make("none", depth=4 if distributed.get_rank() == 0 else 2)
    x = batch()
    budget = 340_000
    with recollect.fit(model, x, loss=lose, budget=budget) as fitted:
        forecast = fitted.plan.forecast
        assert forecast is not None
        assert (forecast.measured_peak_bytes or budget + 1) <= budget
        return [region.path for region in fitted.plan.regions], fitted.plan.forecast is not None


def test_stages_of_a_pipeline_have_plans_of_their_own(ranks: Ranks) -> None:
    (first, _), (second, _) = ranks.run(fit_stages)
    assert first
    assert first != second


class Headed(nn.Module):
    """A head that is larger than the rest; gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = make("none", depth=2), nn.Linear(WIDTH, 512)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def classify(logits: Tensor) -> Tensor:
    return cross_entropy(logits, torch.arange(256) % 512)


def use_levers(engine: str) -> list[str]:
    """Levers are used where parameters are whole; where they are sharded, nothing is, even by a plan made by hand."""
    torch.manual_seed(0)
    whole, x = Headed(), batch()
    twin = copy.deepcopy(whole)
    model: Any = DistributedDataParallel(twin) if engine == "ddp" else fully_shard(twin)
    classify(whole(x)).backward()
    expected = []
    for parameter in whole.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad)
        expected.append(parameter.grad / distributed.get_world_size())
    levers = {"chunked_loss"}
    seen = recollect.profile(model, x, loss=classify)
    smallest = [recollect.plan(seen, budget="min").peak_bytes]
    distributed.broadcast_object_list(smallest)
    used = []
    if engine == "ddp":
        fitted = recollect.fit(model, x, loss=classify, budget=int(smallest[0] * 0.9), levers=levers)
        used = [lever.name for lever in fitted.plan.levers]
    else:
        lever = PlannedLever(name="chunked_loss", paths=("head",))
        with pytest.raises(ValueError, match="cannot be used on 'head': its parameters are spread over processes"):
            recollect.apply(model, recollect.Plan(levers=(lever,)))
    model.zero_grad()
    classify(model(x)).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        found: Any = parameter.grad
        torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, grad)
    return used


def test_levers_are_used_where_parameters_are_whole(ranks: Ranks) -> None:
    assert ranks.run(use_levers, "ddp") == [["chunked_loss"], ["chunked_loss"]]
    assert ranks.run(use_levers, "fsdp2") == [[], []]


def refuse() -> None:
    rank = distributed.get_rank()
    model, x = make("ddp"), batch()
    with pytest.raises(recollect.BudgetError, match=r"no plan fits 1.00 KiB"):
        recollect.fit(model, x, loss=lose, budget="1KiB")
    with pytest.raises(ValueError, match=r"rank \d has another budget than rank \d"):
        recollect.fit(model, x, loss=lose, budget=f"{rank + 1}GiB")
    with pytest.raises(ValueError, match="recover=True is for one process"):
        recollect.fit(model, x, loss=lose, budget="1GiB", recover=True)
    with pytest.raises(ValueError, match="the processes have different models"):
        recollect.fit(make("none", depth=3 + rank), x, loss=lose, budget="1GiB", levers={"chunked_loss"})
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_ranks_do_not_agree_on_is_refused_on_all(ranks: Ranks) -> None:
    ranks.run(refuse)


def decide() -> tuple[int, int | None, bool]:
    rank = distributed.get_rank()
    peers = Peers(nn.Linear(1, 1))
    assert peers.is_leader == (rank == 0)
    with pytest.raises(ValueError, match="on the second"):
        peers.together(lambda: fail("on the second") if rank else None)
    with pytest.raises(ValueError, match="on the first"):
        peers.decide(lambda: fail("on the first"))
    assert peers.largest(None if rank else 3) is None
    assert not peers.all(rank == 0)
    return peers.decide(lambda: rank + 7), peers.largest(rank), peers.all(True)


def fail(message: str) -> None:
    raise ValueError(message)


def test_what_is_decided_is_decided_once(ranks: Ranks) -> None:
    assert ranks.run(decide) == [(7, 1, True), (7, 1, True)]
