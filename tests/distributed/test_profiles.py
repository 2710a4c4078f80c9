"""Profiles of steps under DDP and FSDP2: collectives, gathered parameters, and training that goes on as if none was."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect import Profile
from recollect._core.calls import Category, Phase
from tests.distributed.launch import Ranks
from tests.distributed.nets import Net, assert_same_steps, batches, train


def make(engine: str, rules: Any) -> Any:
    torch.manual_seed(0)
    net = Net()
    if rules is not None:
        recollect.apply(net, rules)
    if engine == "ddp":
        return DistributedDataParallel(net)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def compare(engine: str, rules: Any) -> None:
    plain, profiled = make(engine, rules), make(engine, rules)
    expected = train(plain)
    found = recollect.profile(profiled, batches(1)[0])
    assert_same_steps(expected, train(profiled))  # as if there had been no profile
    found = recollect.profile(profiled, batches(1)[0])
    check(found, engine, rules)
    assert Profile.from_json(found.to_json()) == found


def check(found: Profile, engine: str, rules: Any) -> None:
    assert any(call.is_collective for call in found.calls)
    paths = {entry.path for entry in found.modules}
    assert {"", "embed", "layers.0", "layers.2", "head"} <= paths
    products = [call for call in found.calls if call.op == "aten.addmm.default" and call.phase is Phase.FORWARD]
    assert {call.module.partition(".")[0] for call in products} == {"embed", "layers", "head"}
    again = [call for call in found.calls if call.phase is Phase.RECOMPUTATION]
    assert bool(again) == (rules is not None)
    parameters = {s.name for s in found.storages if s.category is Category.PARAMETER}
    assert any(name.startswith("layers.1.") for name in parameters)
    if engine == "fsdp2":
        whole = sum(parameter.numel() for parameter in Net().parameters()) * 4
        sharded = sum(s.bytes for s in found.storages if s.category is Category.PARAMETER)
        assert sharded <= 0.6 * whole


@pytest.mark.parametrize("rules", [None, "full"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_step_under_an_engine_is_profiled_and_changes_nothing(ranks: Ranks, engine: str, rules: Any) -> None:
    ranks.run(compare, engine, rules)
