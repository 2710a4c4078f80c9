"""Regions under DistributedDataParallel: gradients of plain DDP to the bit, each bucket reduced once."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect import Decision, compat
from tests.distributed.launch import Ranks
from tests.distributed.nets import (
    FEW_WAYS,
    WAYS,
    WIDTH,
    Net,
    assert_same_steps,
    averaged,
    make_regions,
    noted,
    train,
)

GradBucket: Any = vars(distributed)["GradBucket"]
ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "views of buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
}


def make(way: str | None, engine: str, *, before: bool = False, shares: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = Net(shares=shares)
    if way is not None and before:
        make_regions(net, way)
    replica = DistributedDataParallel(net, **ENGINES[engine])
    if way is not None and not before:
        make_regions(net, way)
    return replica


def count(replica: DistributedDataParallel, **options: Any) -> tuple[list[Any], int]:
    """Steps, and how many buckets were reduced on the way."""
    buckets = 0

    def reduce(world: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal buckets
        buckets += 1
        work = distributed.all_reduce(bucket.buffer().div_(world.size()), group=world, async_op=True)
        assert work is not None
        reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return reduced

    replica.register_comm_hook(distributed.group.WORLD, reduce)
    return train(replica, **options), buckets


def compare(engine: str, shares: bool) -> None:
    plain, plain_buckets = count(make(None, engine, shares=shares))
    torch.manual_seed(0)
    for (_, alone), (_, found) in zip(averaged(train(Net(shares=shares), steps=1)), plain, strict=False):
        assert all(torch.equal(value, found[f"module.{name}"]) for name, value in alone.items())
    for index, way in enumerate(WAYS, list(ENGINES).index(engine)):
        with noted(way):
            ours, our_buckets = count(make(way, engine, before=index % 2 == 0, shares=shares))
            assert_same_steps(plain, ours)
            assert our_buckets == plain_buckets > 0


def profile_first(engine: str, accumulates: bool) -> None:
    """A profile is the first to run the replica, where a reducer notes which parameters are used."""
    plain, ours = make(None, engine), make(None, engine)
    x = torch.randn(4, WIDTH)
    for replica in (plain, ours) if accumulates else ():
        torch.manual_seed(1)
        replica(x).sum().backward()
    recollect.profile(ours, x, timed=False)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == (not accumulates)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)
    assert_same_steps(train(plain), train(ours))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_after_a_profile_are_those_of_plain_ddp(ranks: Ranks, engine: str, accumulates: bool) -> None:
    ranks.run(profile_first, engine, accumulates)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_and_reductions_are_those_of_plain_ddp_whatever_is_applied_first(ranks: Ranks, engine: str) -> None:
    ranks.run(compare, engine, False)


@pytest.mark.parametrize("engine", ENGINES)
def test_complaint_33_shared_weights_are_marked_ready_once(ranks: Ranks, engine: str) -> None:
    # A block used twice, each time as a region, made DDP stop: "marked as ready twice".
    ranks.run(compare, engine, True)


def compare_accumulation(engine: str) -> None:
    found = []
    for way in (None, *FEW_WAYS):
        with noted(str(way)):
            replica = make(way, engine)
            train(replica, steps=1)  # a static graph must be learned from a pass that synchronises
            found.append(count(replica, steps=2, micro_batches=3, unsynced=replica.no_sync))
            assert_same_steps(found[0][0], found[-1][0])
            assert found[0][1] == found[-1][1] > 0


@pytest.mark.parametrize("engine", ["as it comes", "static graph", "unused parameters"])
def test_gradients_accumulate_without_synchronising(ranks: Ranks, engine: str) -> None:
    ranks.run(compare_accumulation, engine)


class Writing(nn.ModuleList):
    """Writes in place through a view, so that it is not replayed."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self[0](x)
        h.view(-1).relu_()
        result: Tensor = self[1](h)
        return result


def compare_served() -> None:
    found = []
    for policy in (None, recollect.policies.save_matmuls):
        torch.manual_seed(0)
        net = nn.Sequential(*(Writing((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))) for _ in range(2)))
        replica = DistributedDataParallel(net)
        if policy is not None:
            recollect.apply(net, {"*": policy})
        found.append(train(replica, steps=4))
        if policy is not None:
            assert "again without the operators that are kept" in str(recollect.explain(net))
    assert_same_steps(*found)


def test_a_region_that_talks_to_nobody_is_not_watched(ranks: Ranks) -> None:
    ranks.run(compare_served)


# Parameters that a step does not use.


class Branching(nn.Module):
    """Uses one of two branches, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        result: Tensor = self.head(self.branches[self.turn % 2](x))
        return result


def compare_branches() -> None:
    found = []
    for rules in (None, {"branches.*": Decision.RECOMPUTE}):
        torch.manual_seed(0)
        net = Branching()
        if rules is not None:
            recollect.apply(net, rules)
        found.append(train(DistributedDataParallel(net, find_unused_parameters=True), steps=4))
    assert_same_steps(*found)


def test_a_branch_may_stay_unused(ranks: Ranks) -> None:
    ranks.run(compare_branches)


def use_first_branch(net: Branching, x: Tensor) -> Tensor:
    result: Tensor = net.head(net.branches[0](x))
    return result


def compare_partly_unused() -> None:
    found = []
    for wrap in (lambda function: function, recollect.checkpoint):
        torch.manual_seed(0)
        net = Branching()
        vars(net)["forward"] = wrap(functools.partial(use_first_branch, net))
        found.append(train(DistributedDataParallel(net, find_unused_parameters=True), steps=2))
    assert_same_steps(*found)


def test_a_region_may_leave_parameters_unused(ranks: Ranks) -> None:
    ranks.run(compare_partly_unused)


# What else DDP has a hand in.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def buffers_of(rules: dict[Any, Any] | None) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Normed()
    replica = DistributedDataParallel(net)  # broadcasts rank 0's buffers before each forward
    if rules is not None:
        recollect.apply(net, rules)
    return train(replica), {name: buffer.clone() for name, buffer in net.named_buffers()}


def compare_buffers() -> None:
    plain, statistics = buffers_of(None)
    ours, our_statistics = buffers_of({"layers.*": Decision.RECOMPUTE})
    assert_same_steps(plain, ours)
    assert all(torch.equal(value, our_statistics[name]) for name, value in statistics.items())


def test_running_statistics_move_once_and_stay_synchronised(ranks: Ranks) -> None:
    ranks.run(compare_buffers)


def freeze(net: Net) -> None:
    net.layers[0].requires_grad_(False)
    net.embed.requires_grad_(False)


def compare_freezing() -> None:
    orders: list[list[Callable[[Net], Any]]] = [
        [freeze],
        [freeze, lambda net: make_regions(net, "inside")],
        [lambda net: make_regions(net, "inside"), freeze],
    ]
    found = []
    for order in orders:
        torch.manual_seed(0)
        net = Net()
        for act in order:
            act(net)
        found.append(train(DistributedDataParallel(net), steps=2))
    assert_same_steps(found[0], found[1])
    assert_same_steps(found[0], found[2])


def test_parameters_may_be_frozen_before_or_after(ranks: Ranks) -> None:
    ranks.run(compare_freezing)


class Reentrant(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in (*self.layers, *self.layers) if self.shares else self.layers:
            x = compat.checkpoint(layer, x, use_reentrant=True)
        result: Tensor = self.head(x)
        return result


def reentrant_steps() -> None:
    found = []
    for kind in (Net, Reentrant):
        torch.manual_seed(0)
        found.append(train(DistributedDataParallel(kind(), static_graph=True), steps=2))
    assert_same_steps(*found)


def test_the_reentrant_engine_works_with_a_static_graph(ranks: Ranks) -> None:
    ranks.run(reentrant_steps)


def be_ready_twice() -> None:
    with pytest.raises(RuntimeError, match="marked as ready twice"):
        train(DistributedDataParallel(Reentrant(shares=True)), steps=1)


def test_ddp_would_say_so_if_weights_were_ready_twice(ranks: Ranks) -> None:
    ranks.run(be_ready_twice)


class Wide(nn.Module):
    """Layers of 2 MiB each, so that there is more than one bucket to a model."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def train_compiled(rules: str | None) -> tuple[list[Tensor], int, int]:
    """The gradients of a step, how many graphs DDP cuts it into, and the bytes that those keep besides parameters."""
    from torch._dynamo import lookup_backend

    torch.manual_seed(0)
    model, graphs, kept_bytes = Wide(), 0, 0
    if rules is not None:
        recollect.apply(model, rules)

    def compile_each(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    def keep(saved: Tensor) -> Tensor:
        nonlocal kept_bytes
        kept_bytes += 0 if isinstance(saved, nn.Parameter) else saved.nbytes
        return saved

    step = torch.compile(DistributedDataParallel(model, bucket_cap_mb=3), backend=compile_each)
    x = torch.randn(8, 256) + distributed.get_rank()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        loss = step(x)
    loss.backward()
    torch.compiler.reset()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], graphs, kept_bytes


def compare_compiled() -> None:
    plain, _, plain_bytes = train_compiled(None)
    for rules in ("full", "selective"):
        found, graphs, kept_bytes = train_compiled(rules)
        assert graphs > 1  # of which one may be less than plain: no region is cut in two
        assert kept_bytes < plain_bytes
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_compiled_regions_stay_regions_where_ddp_cuts_the_graph_at_its_buckets(ranks: Ranks) -> None:
    ranks.run(compare_compiled)
