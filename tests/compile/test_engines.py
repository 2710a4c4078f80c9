"""Regions under torch.compile with torch's parallel engines, on two processes."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect import Decision, compat, policies
from recollect.compat import composable
from tests.compile.counting import Graphs, count_ops
from tests.distributed.launch import Ranks

RULES: dict[str, Any] = {"recompute": Decision.RECOMPUTE, "matmuls": policies.save_matmuls}
WAYS = ("plain", *RULES, "composable", "wrapper")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sigmoid()).tanh()  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def make_regions(net: Net, way: str) -> None:
    if way in RULES:
        recollect.apply(net, {"blocks.*": RULES[way]})
    for number, block in enumerate(net.blocks):
        if way == "composable":
            composable.checkpoint(block)
        elif way == "wrapper":
            net.blocks[number] = compat.checkpoint_wrapper(block)


def step(model: Any, net: nn.Module) -> list[Tensor]:
    """Gradients of one step, in the order of the parameters."""
    generator = torch.Generator().manual_seed(1 + distributed.get_rank())
    net.zero_grad()
    model(torch.randn(4, 64, generator=generator)).square().sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found if grad is not None]


def quiet() -> Any:
    """On a rank: the ranks take warnings for errors, and these are torch's own."""
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    return caught


def train_ddp(way: str) -> tuple[float, int, dict[str, int]]:
    """How far compiled gradients are from the plain ones, the number of graphs, and what backward runs."""
    caught = quiet()
    torch._dynamo.reset()
    plain, net, graphs = Net(), Net(), Graphs()
    expected = step(DistributedDataParallel(plain), plain)
    make_regions(net, way)
    # One block in each bucket; the first may not be larger than the others.
    with mock.patch.object(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1):
        model = torch.compile(DistributedDataParallel(net, bucket_cap_mb=0.02), backend=graphs.backend)
        for _ in range(2):
            found = step(model, net)
    assert len(found) == len(expected)
    farthest = max(float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True))
    torch._dynamo.reset()
    caught.__exit__(None, None, None)
    return farthest, len(graphs.backward), graphs.count("addmm", "sigmoid", "tanh")


AGAIN = {
    "plain": {"addmm": 0, "sigmoid": 0, "tanh": 0},
    "recompute": {"addmm": 4, "sigmoid": 2, "tanh": 2},
    "matmuls": {"addmm": 0, "sigmoid": 2, "tanh": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_regions_survive_the_split_of_ddps_graphs(ranks: Ranks, way: str) -> None:
    for farthest, graphs, counts in ranks.run(train_ddp, way):
        assert farthest < 1e-5
        assert graphs > 1, "DDP has not split the graph, so this shows nothing"
        assert counts == AGAIN.get(way, AGAIN["recompute"])


def train_fsdp2(way: str, order: str) -> tuple[float, dict[str, int], dict[str, int]]:
    """How far compiled gradients are from the plain ones, and what forward and backward run."""
    caught = quiet()
    torch._dynamo.reset()
    plain, net, graphs = Net(), Net(), Graphs()
    expected = step(plain, plain)
    for gradient in expected:
        distributed.all_reduce(gradient)
        gradient.div_(distributed.get_world_size())
    make_regions(net, way)
    backend = graphs.backend
    for block in net.blocks:
        if order == "compiled blocks":
            block.compile(backend=backend)
        fully_shard(block)
    fully_shard(net)
    model = torch.compile(net, backend=backend) if order == "compiled whole" else net
    for _ in range(2):
        found = step(model, net)
    assert len(found) == len(expected)
    farthest = max(float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True))
    torch._dynamo.reset()
    caught.__exit__(None, None, None)
    names = ("addmm", "sigmoid", "tanh")
    return farthest, count_ops(graphs.forward, *names), graphs.count(*names)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["compiled blocks", "compiled whole"])
def test_regions_are_compiled_under_fsdp2(ranks: Ranks, way: str, order: str) -> None:
    for farthest, forward, counts in ranks.run(train_fsdp2, way, order):
        assert farthest < 1e-5
        assert forward["sigmoid"] > 0, "a block has run uncompiled"
        again = counts["sigmoid"]
        assert again == (0 if way == "plain" else forward["sigmoid"])
        if way == "matmuls":
            assert counts["addmm"] == 0
