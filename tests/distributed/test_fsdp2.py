"""Regions under FSDP2: gradients are those of plain FSDP2 to the bit, and so are the gathers and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recollect
from recollect import Decision, policies
from tests.distributed.launch import Ranks
from tests.distributed.nets import (
    FEW_WAYS,
    INSIDE,
    WAYS,
    WIDTH,
    Net,
    assert_same_steps,
    averaged,
    batches,
    gradients,
    make_regions,
    noted,
    one_by_one,
    patched,
    train,
)


@contextmanager
def gathers() -> Iterator[list[str]]:
    """The first parameter of each unit that is gathered, in order."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    seen: list[str] = []

    def noting(gather: Callable[..., Any]) -> Callable[..., Any]:
        def noted(params: Any, *args: Any) -> Any:
            seen.append(params[0]._param_fqn)
            return gather(params, *args)

        return noted

    with patched(_fsdp_param_group, "foreach_all_gather", noting):
        yield seen


# How a network is sharded.


def shard(net: Any, **options: Any) -> None:
    for module in (*net.layers, net.head, net):
        fully_shard(module, **options)


def always_resharded(net: Any) -> None:
    shard(net, reshard_after_forward=True)


def never_resharded(net: Any) -> None:
    shard(net, reshard_after_forward=False)


def as_torch_chooses(net: Any) -> None:
    shard(net)


def in_lower_precision(net: Any) -> None:
    shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def with_cast_outputs(net: Any) -> None:
    shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))


def nested(net: Any) -> None:
    for layer in net.layers:
        fully_shard(layer.up, reshard_after_forward=True)
        fully_shard(layer.down, reshard_after_forward=True)
    always_resharded(net)


def in_one_unit(net: Any) -> None:
    fully_shard(net, reshard_after_forward=True)


def grouped(net: Any) -> None:
    for layer in net.layers:
        fully_shard([layer.up, layer.down], reshard_after_forward=True)
    fully_shard(net, reshard_after_forward=True)


def with_frozen_weights(net: Any) -> None:
    net.embed.requires_grad_(False)
    net.layers[0].requires_grad_(False)
    for layer in net.layers:
        layer.up.weight.requires_grad_(False)
        layer.norm.requires_grad_(False)
    always_resharded(net)


def kept_on_the_host(net: Any) -> None:
    shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False), reshard_after_forward=True)


def prefetching(net: Any) -> None:
    always_resharded(net)
    layers = list(net.layers)
    for one, other in pairwise(layers):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])


# The hook of older versions does not cast again in recomputation; torch's own checkpoint fails there too.
CASTS_AGAIN = hasattr(FSDPState, "_cast_forward_inputs")
SHARDINGS = (
    *(always_resharded, never_resharded, as_torch_chooses, in_lower_precision, with_cast_outputs),
    *(nested, in_one_unit, grouped, with_frozen_weights, kept_on_the_host, prefetching),
)
Sharding = Callable[[Any], None]


def make(sharding: Sharding, way: str | None, *, before: bool = False) -> Net:
    torch.manual_seed(0)
    net = Net()
    if before and way is not None:
        make_regions(net, way)
    sharding(net)
    if not before and way is not None:
        make_regions(net, way)
    return net


def count(net: Any) -> tuple[list[Any], list[list[str]]]:
    """Two steps, and what is gathered before, in and after each forward, the last one's after included."""
    found: list[list[str]] = []
    with gathers() as seen:

        def cut_here(*_: Any) -> None:
            found.append(seen.copy())
            seen.clear()

        net.register_forward_pre_hook(cut_here)
        net.register_forward_hook(cut_here)
        steps = train(net, steps=2)
        found.append(seen)
    return steps, found


def compare(sharding: Sharding) -> None:
    plain, plain_gathers = count(make(sharding, None))
    ways = WAYS if CASTS_AGAIN or sharding is not with_cast_outputs else INSIDE
    for index, way in enumerate(ways, SHARDINGS.index(sharding)):
        with noted(way):
            ours, our_gathers = count(make(sharding, way, before=index % 2 == 0))
            assert_same_steps(plain, ours)
            if way.startswith("around all"):
                # Recomputation asks for the units in forward's order, so that backward's cannot be the plain one.
                assert [Counter(some) for some in our_gathers] == [Counter(some) for some in plain_gathers]
                assert our_gathers[1::2] == plain_gathers[1::2]  # forward's
            else:
                assert our_gathers == plain_gathers


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_gradients_and_gathers_are_those_of_plain_fsdp2_whatever_is_applied_first(
    ranks: Ranks, sharding: Sharding
) -> None:
    ranks.run(compare, sharding)


def compare_with_whole() -> None:
    torch.manual_seed(0)
    whole = averaged(train(Net(), steps=1))
    for way in WAYS:
        with noted(way):
            ((loss, found),) = train(make(always_resharded, way), steps=1)
            shards = {name: cut(value) for name, value in whole[0][1].items()}
            assert_same_steps([(whole[0][0], shards)], [(loss, found)])


def cut(value: Tensor) -> Tensor:
    """This rank's shard of a parameter."""
    return value.chunk(distributed.get_world_size())[distributed.get_rank()]


def test_gradients_are_those_of_the_network_that_is_not_sharded(ranks: Ranks) -> None:
    ranks.run(compare_with_whole)


# Several passes.


def several_forwards_first(net: Any) -> list[Any]:
    torch.manual_seed(1)
    losses = [net(x).square().mean() for x in batches(3)]
    found = []
    for loss in losses:
        torch.autograd.backward(loss)
        found.append((loss.detach(), gradients(net)))
    return found


def accumulating(net: Any) -> list[Any]:
    @contextmanager
    def unsynced() -> Iterator[None]:
        net.set_requires_gradient_sync(False)
        yield
        net.set_requires_gradient_sync(True)

    return train(net, steps=2, micro_batches=2, unsynced=unsynced)


def staying_gathered(net: Any) -> list[Any]:
    """Units are not resharded between two micro batches, so that the second forward gathers nothing."""

    @contextmanager
    def unsynced() -> Iterator[None]:
        net.set_reshard_after_backward(False)
        yield
        net.set_reshard_after_backward(True)

    return train(net, steps=2, micro_batches=2, unsynced=unsynced)


def gathered_before(net: Any) -> list[Any]:
    for layer in net.layers:
        layer.unshard()
    return train(net, steps=1)


def compare_passes(run: Callable[[Any], list[Any]]) -> None:
    with gathers() as plain_gathers:
        plain = run(make(always_resharded, None))
    for way in WAYS:
        with noted(way), gathers() as our_gathers:
            assert_same_steps(plain, run(make(always_resharded, way)))
            assert Counter(our_gathers) == Counter(plain_gathers)
            assert our_gathers == plain_gathers or way.startswith("around all")


@pytest.mark.parametrize("run", [several_forwards_first, accumulating, staying_gathered, gathered_before])
def test_passes_need_not_alternate(ranks: Ranks, run: Callable[[Any], list[Any]]) -> None:
    ranks.run(compare_passes, run)


# What recomputation reads.


def step_before_backward(way: str) -> str:
    net = make(always_resharded, way)
    loss = net(batches(1)[0]).square().mean()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    with pytest.raises(recollect.ChangedInputError) as refusal:
        torch.autograd.backward(loss)
    return str(refusal.value)


@pytest.mark.parametrize("way", ["around each", "around all"])
def test_a_shard_that_was_changed_before_backward_is_refused(ranks: Ranks, way: str) -> None:
    for text in ranks.run(step_before_backward, way):
        assert "parameter 'weight' of LayerNorm was changed in place between forward and recomputation" in text


class WithWeightsPassed(nn.Linear):
    """Gives its parameters to a region as arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return recollect.checkpoint(scaled)(x, weight=self.weight, rest={"bias": self.bias})


def scaled(x: Tensor, *, weight: Tensor, rest: dict[str, Tensor]) -> Tensor:
    return nn.functional.linear(x.sin(), weight, rest["bias"]).exp()


class Plainly(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, weight=self.weight, rest={"bias": self.bias})


def compare_passed_weights() -> None:
    found = []
    for kind in (Plainly, WithWeightsPassed):
        torch.manual_seed(0)
        net = nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(2)))
        net[0].bias.requires_grad_(False)
        for module in (*net, net):
            fully_shard(module, reshard_after_forward=True)
        found.append(train(net, steps=2))
    assert_same_steps(*found)


def test_parameters_passed_as_arguments_are_full_again_in_recomputation(ranks: Ranks) -> None:
    ranks.run(compare_passed_weights)


def with_tensor_parallel_layers(net: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    for layer in net.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(net, mesh=mesh["data"], reshard_after_forward=True)


def compare_two_dimensions() -> None:
    plain = train(make(with_tensor_parallel_layers, None), steps=2)
    for way in WAYS:
        with noted(way):
            assert_same_steps(plain, train(make(with_tensor_parallel_layers, way), steps=2))


def test_parameters_may_be_sharded_tensors_when_gathered(ranks: Ranks) -> None:
    ranks.run(compare_two_dimensions)


# Units that are not run again.


class Body(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return one_by_one(self.layers, x)


def count_with_kept_units(kept: str) -> tuple[list[list[str]], list[list[str]]]:
    plain, plain_gathers = count(make(always_resharded, None))
    net = make(always_resharded, None)
    region = recollect.checkpoint(Body(net.layers), policy=policies.save_modules(kept))
    net.through = lambda _, x: region(x)
    ours, our_gathers = count(net)
    assert_same_steps(plain, ours)
    return plain_gathers, our_gathers


@pytest.mark.parametrize("kept", ["layers.0", "layers.1", "layers.*"])
def test_a_unit_that_a_policy_keeps_is_gathered_as_often_as_without_us(ranks: Ranks, kept: str) -> None:
    for plain, ours in ranks.run(count_with_kept_units, kept):
        assert [Counter(some) for some in ours] == [Counter(some) for some in plain]


RULES: list[dict[Any, Any]] = [
    {"layers.*": Decision.RECOMPUTE, "layers.*.up": Decision.SAVE},
    {"layers.*.up": Decision.RECOMPUTE, "layers.*.down": Decision.RECOMPUTE},
    {"layers.0": Decision.RECOMPUTE, "layers.2": policies.save_matmuls},
]


def compare_rules(sharding: Sharding) -> None:
    plain, plain_gathers = count(make(sharding, None))
    for rules in RULES:
        with noted(str(rules)):
            net = make(sharding, None)
            recollect.apply(net, rules)
            ours, our_gathers = count(net)
            assert_same_steps(plain, ours)
            assert our_gathers == plain_gathers


@pytest.mark.parametrize("sharding", [nested, always_resharded])
def test_regions_may_be_larger_or_smaller_than_units_and_keep_some(ranks: Ranks, sharding: Sharding) -> None:
    ranks.run(compare_rules, sharding)


def apply_and_remove() -> None:
    plain = count(make(always_resharded, None))
    net = make(always_resharded, None)
    before = {name: vars(module).copy() for name, module in net.named_modules()}
    handle = recollect.apply(net, {"layers.*": Decision.RECOMPUTE, "layers.*.up": Decision.SAVE})
    handle.remove()
    assert {name: vars(module) for name, module in net.named_modules()} == before
    steps, found = count(net)
    assert_same_steps(plain[0], steps)
    assert found == plain[1]


def test_removing_leaves_plain_units(ranks: Ranks) -> None:
    ranks.run(apply_and_remove)


# By the number of the complaint.


def test_complaint_27_recomputation_gathers_no_unit_again(ranks: Ranks) -> None:
    # Recomputing a block gathered its parameters once more.
    for plain, ours in ranks.run(gathers_of_a_step, "inside"):
        assert ours == plain
        assert max(Counter(plain).values()) == 2  # once in forward, once in backward


def gathers_of_a_step(way: str) -> tuple[list[str], list[str]]:
    found = []
    for each in (None, way):
        with gathers() as seen:
            train(make(always_resharded, each), steps=1)
        found.append(seen)
    return found[0], found[1]


@pytest.mark.parametrize("way", FEW_WAYS)
def test_complaint_34_parameters_are_full_in_recomputation_gathered_once_and_in_order(ranks: Ranks, way: str) -> None:
    # Recomputation found parameters empty, gathered them twice, or sent the prefetch the wrong way.
    for plain, ours in ranks.run(gathers_of_a_step, way):
        assert Counter(ours) == Counter(plain)
        assert ours == plain or way.startswith("around all")


def gather_once_more() -> list[list[str]]:
    net = make(always_resharded, None)
    net.layers[1].register_forward_hook(lambda layer, *_: layer.unshard() and None)
    return count(net)[1]


def test_the_count_sees_a_gather_too_many(ranks: Ranks) -> None:
    for found in ranks.run(gather_once_more):
        assert Counter(found[1])["layers.1.norm.weight"] == 2


# More ranks.


def sharded_to_pairs(net: Any) -> None:
    shard(net, reshard_after_forward=2)


def compare_pairs() -> None:
    plain, plain_gathers = count(make(sharded_to_pairs, None))
    for way in FEW_WAYS:
        with noted(way):
            ours, our_gathers = count(make(sharded_to_pairs, way))
            assert_same_steps(plain, ours)
            assert [Counter(some) for some in our_gathers] == [Counter(some) for some in plain_gathers]


def test_units_may_stay_sharded_over_fewer_ranks_after_forward() -> None:
    with Ranks(4) as ranks:
        ranks.run(compare_pairs)
