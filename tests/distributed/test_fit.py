"""fit among several processes: one plan for all of a model, made by the first and agreed on; one for each stage."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect._apply import levers
from recollect._core.calls import Category
from recollect._core.levers import PlannedLever
from recollect._fit.ranks import Ranks as Peers
from recollect._levers.chunked_forward import call_in_chunks
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


class Losing(Headed):
    """Gives its loss, as models of Transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return classify(self.head(self.body(x)))


def average(whole: nn.Module, lose: Any, x: Tensor) -> list[Tensor]:
    """The gradients that all ranks together would have."""
    lose(whole(x)).backward()
    found = []
    for parameter in whole.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad)
        found.append(parameter.grad / distributed.get_world_size())
    return found


def check_gradients(model: nn.Module, lose: Any, x: Tensor, expected: list[Tensor]) -> None:
    model.zero_grad()
    lose(model(x)).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        found: Any = parameter.grad
        torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, grad)
    model.zero_grad()


def use_loss_lever(engine: str) -> list[str]:
    torch.manual_seed(0)
    whole, x = Losing(), batch()
    model: Any = copy.deepcopy(whole)
    model = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    expected = average(whole, torch.sum, x)
    seen = recollect.profile(model, x)
    smallest = [recollect.plan(seen, budget="min").peak_bytes]
    distributed.broadcast_object_list(smallest)
    with recollect.fit(model, x, budget=int(smallest[0] * 0.9), levers={"chunked_loss"}) as fitted:
        check_gradients(model, torch.sum, x, expected)
        return [lever.name for lever in fitted.plan.levers]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_loss_is_chunked_on_all_ranks(ranks: Ranks, engine: str) -> None:
    assert ranks.run(use_loss_lever, engine) == [["chunked_loss"], ["chunked_loss"]]


def chunk_blocks() -> int:
    """FSDP2 gathers whole blocks, parts of which run in chunks."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), make("none", depth=1)) for _ in range(3)))
    x = batch()
    model: Any = copy.deepcopy(whole)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    expected = average(whole, lose, x)
    with recollect.fit(model, x, loss=lose, budget="min", levers={"chunked_mlp": "*.1"}) as fitted:
        with mock.patch.object(levers, "call_in_chunks", wraps=call_in_chunks) as chunked:
            check_gradients(model, lose, x, expected)
        assert chunked.call_count >= 3
        (lever,) = fitted.plan.levers
        return len(lever.paths)


def test_parts_of_sharded_blocks_run_in_chunks(ranks: Ranks) -> None:
    assert ranks.run(chunk_blocks) == [3, 3]


def use_levers_where_they_cannot() -> None:
    """Logits that leave a sharded model are computed there; a head that is gathered by itself is refused."""
    torch.manual_seed(0)
    whole, x = Headed(), batch()
    expected = average(whole, classify, x)
    lever = recollect.Plan(levers=(PlannedLever(name="chunked_loss", paths=("head",)),))
    model: Any = fully_shard(copy.deepcopy(whole))
    with recollect.apply(model, lever):
        assert isinstance(model(x), Tensor)
        check_gradients(model, classify, x, expected)
    assert not any("forward" in vars(module) for module in model.modules())
    apart: Any = copy.deepcopy(whole)
    fully_shard(apart.head)
    with pytest.raises(ValueError, match="cannot be used on 'head': FSDP gathers its parameters separately"):
        recollect.apply(fully_shard(apart), lever)
    split = parallelize_module(
        copy.deepcopy(whole), init_device_mesh("cpu", (2,)), {"head": ColwiseParallel(output_layouts=Replicate())}
    )
    with pytest.raises(ValueError, match="on 'head': tensor parallelism shards its parameters"):
        recollect.apply(split, lever)


def test_levers_that_sharded_parameters_do_not_let_work_are_refused_or_computed_whole(ranks: Ranks) -> None:
    ranks.run(use_levers_where_they_cannot)


def refuse() -> None:
    rank = distributed.get_rank()
    model, x = make("ddp"), batch()
    with pytest.raises(recollect.BudgetError, match=r"no plan fits 1.00 KiB"):
        recollect.fit(model, x, loss=lose, budget="1KiB")
    with pytest.raises(ValueError, match=r"rank \d and rank \d do not have the same budget"):
        recollect.fit(model, x, loss=lose, budget=f"{rank + 1}GiB")
    with pytest.raises(ValueError, match="recover=True works in a single process only"):
        recollect.fit(model, x, loss=lose, budget="1GiB", recover=True)
    with pytest.raises(ValueError, match="levers need the same model in every process"):
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
