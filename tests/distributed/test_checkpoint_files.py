"""Checkpoints on disk (torch.distributed.checkpoint) show no trace of us, and pass between applied and plain models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect import Decision, policies
from tests.distributed.launch import Ranks
from tests.distributed.nets import Net, batches, local

files: Any = checkpoint  # its annotations say that it exports nothing
RULES: dict[Any, Any] = {"layers.*": Decision.RECOMPUTE, "head": policies.save_matmuls}
Engine = Callable[[Net], nn.Module]


def plain(net: Net) -> nn.Module:
    return net


def replicated(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def sharded(net: Net) -> nn.Module:
    for module in (*net.layers, net):
        fully_shard(module)
    return net


ENGINES = (plain, replicated, sharded)


def make(engine: Engine, seed: int, *, applied: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step of training."""
    torch.manual_seed(seed)
    net = Net(dropout=0.0)
    model = engine(net)
    if applied:
        recollect.apply(net, RULES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.autograd.backward(model(batches(1)[0]).square().mean())
    if engine is plain:  # what an engine would do
        for parameter in model.parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(batches(1)[0])
        return result


def save_and_load(engine: Engine, folder: str, saves: bool, loads: bool) -> None:
    model, optimizer = make(engine, 0, applied=saves)
    expected = output(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    assert list(state) == list(Net().state_dict())
    files.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)

    other, other_optimizer = make(engine, 1, applied=loads)
    assert not torch.equal(output(other), expected)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    files.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert torch.equal(output(other), expected)
    one, two = (get_state_dict(*pair) for pair in ((model, optimizer), (other, other_optimizer)))
    assert_same(one[0], two[0])
    states: list[Any] = [one[1]["state"], two[1]["state"]]
    for name in one[0]:
        assert_same(states[0][name], states[1][name])


def assert_same(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(local(value), local(other[name])) for name, value in one.items())


@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_passes_between_applied_and_plain_models(
    ranks: Ranks, tmp_path: Path, engine: Engine, saves: bool, loads: bool
) -> None:
    ranks.run(save_and_load, engine, str(tmp_path / "saved"), saves, loads)


def compare_states(engine: Engine) -> None:
    (ours, our_optimizer), (theirs, their_optimizer) = (make(engine, 0, applied=applied) for applied in (True, False))
    for read in (get_model_state_dict, lambda model: model.state_dict()):
        assert_same(read(ours), read(theirs))
    one, other = get_optimizer_state_dict(ours, our_optimizer), get_optimizer_state_dict(theirs, their_optimizer)
    assert list(one["state"]) == list(other["state"])
    assert one["param_groups"] == other["param_groups"]
    set_model_state_dict(theirs, get_model_state_dict(ours))
    set_model_state_dict(ours, get_model_state_dict(theirs))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_states_of_model_and_optimizer_are_the_plain_ones(ranks: Ranks, engine: Engine) -> None:
    ranks.run(compare_states, engine)


def save_from_one_engine(engine: Engine, other: Engine, folder: str) -> None:
    model, _ = make(engine, 0, applied=True)
    files.save(get_model_state_dict(model), checkpoint_id=folder)
    target, _ = make(other, 1, applied=False)
    state = get_model_state_dict(target)
    files.load(state, checkpoint_id=folder)
    set_model_state_dict(target, state)
    assert torch.allclose(output(target), output(model))


@pytest.mark.parametrize(("engine", "other"), [(sharded, plain), (plain, sharded), (replicated, sharded)])
def test_a_checkpoint_passes_between_engines(ranks: Ranks, tmp_path: Path, engine: Engine, other: Engine) -> None:
    ranks.run(save_from_one_engine, engine, other, str(tmp_path / "saved"))
