"""Kept operator results that live elsewhere until backward: gradients to the bit, lifetimes, and what is said of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import recollect
from recollect import Decision, Site
from recollect._offload.offload import Offload, deciding_for, make_offload

pytestmark = pytest.mark.filterwarnings("ignore:offloading to .* makes each step wait")  # such small steps do

STEPS = 4
OFFLOADERS: dict[str, Callable[[], Offload]] = {
    "host": lambda: make_offload("host", min_bytes=0, copies_host=True),
    "disk": lambda: make_offload("disk", min_bytes=0),
}


@pytest.fixture(params=OFFLOADERS)
def away(request: pytest.FixtureRequest) -> Iterator[Offload]:
    """Where policies offload to in this test."""
    made = OFFLOADERS[request.param]()
    with deciding_for(made):
        yield made


def offload_products(site: Site) -> Decision:
    return Decision.OFFLOAD if site.op.startswith(("aten.mm", "aten.addmm")) else Decision.RECOMPUTE


def mix(site: Site) -> Decision:
    if site.op.startswith("aten.addmm"):
        return Decision.OFFLOAD
    return Decision.SAVE if site.op.startswith("aten.gelu") else Decision.RECOMPUTE


def draw_too(site: Site) -> Decision:
    return Decision.OFFLOAD if site.is_random or site.op.startswith("aten.addmm") else Decision.RECOMPUTE


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8), nn.Tanh())


def step(net: nn.Module, call: Callable[[Tensor], Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(16, 8, requires_grad=True)
    net.zero_grad()
    call(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("policy", [offload_products, mix, draw_too])
def test_gradients_are_those_of_plain_training(away: Offload, policy: Callable[[Site], Decision]) -> None:
    net = make_net()
    region = recollect.checkpoint(net, policy=policy)
    sent = []
    for seed in range(STEPS):
        plain, ours = step(net, net, seed), step(net, region, seed)
        assert all(map(torch.equal, plain, ours))
        sent.append(away.report().out_bytes)
    assert max(sent) > 0  # once learned, what is needed at once is not sent


def test_values_that_differ_in_size_from_call_to_call_are_offloaded(away: Offload) -> None:
    def by_size(site: Site) -> Decision:
        return Decision.OFFLOAD if site.bytes > 1024 else Decision.RECOMPUTE

    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
    region = recollect.checkpoint(net, policy=by_size)
    for rows in (4, 8, 16, 32, 48, 2):
        x = torch.randn(rows, 8)
        grads = []
        for call in (net, region):
            net.zero_grad()
            call(x).square().sum().backward()
            grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
    assert away.tier in {"host", "disk"}


def test_backward_can_run_again(away: Offload) -> None:
    del away
    net = make_net()[0:2]
    x = torch.randn(16, 8, requires_grad=True)
    for _ in range(3):
        y = recollect.checkpoint(net, policy=offload_products)(x).square().sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, retain_graph=True)
        (last,) = torch.autograd.grad(y, x)
        assert torch.equal(first, again)
        assert torch.equal(first, last)


def test_gradients_of_gradients_are_those_of_plain_training(away: Offload) -> None:
    del away
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    region = recollect.checkpoint(net, policy=offload_products)
    x = torch.randn(16, 8, requires_grad=True)
    for _ in range(3):
        found = []
        for call in (net, region):
            (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), x)[0])
        assert torch.equal(*found)


def test_the_memory_of_an_offloaded_value_is_free_between_forward_and_backward(away: Offload) -> None:
    seen: list[ref[torch.UntypedStorage]] = []

    def fn(x: Tensor) -> Tensor:
        product = x @ x
        if not recollect.is_recomputing():
            seen.append(ref(product.untyped_storage()))
        return product.sin().exp()

    region = recollect.checkpoint(fn, policy=offload_products)
    x = torch.randn(32, 32, requires_grad=True)
    for _ in range(3):  # learned, proven, followed
        y = region(x)
        release_all(away)
        assert is_gone(seen[-1])
    y.sum().backward()
    assert x.grad is not None


def is_gone(storage: ref[torch.UntypedStorage]) -> bool:
    """Whether memory is free, once the worker that wrote it has let go."""
    for _ in range(500):
        if storage() is None:
            return True
        time.sleep(0.01)
    return False


def release_all(away: Offload) -> None:
    """Wait for all that is on its way out."""
    away.settle()  # what the region held while it learned
    session = away._session
    assert session._step is not None
    for one in session._step.parcels:
        parcel = one()
        if parcel is not None:
            session.transfers.release([parcel])


def test_a_forward_whose_backward_never_comes_leaks_nothing(away: Offload) -> None:
    session = away._session
    region = recollect.checkpoint(make_net(), policy=offload_products)
    for _ in range(STEPS):
        region(torch.randn(16, 8))
    gc.collect()
    assert session._step is not None
    assert all(parcel() is None for parcel in session._step.parcels)


def test_a_value_changed_after_the_region_gives_a_right_gradient(away: Offload) -> None:
    del away
    region = recollect.checkpoint(lambda x: (x @ x, (x @ x).sin()), policy=offload_products)
    for _ in range(3):
        x = torch.randn(8, 8, requires_grad=True)
        product, wave = region(x)
        with torch.no_grad():
            product.mul_(2)
        (ours,) = torch.autograd.grad(wave.sum(), x)
        (plain,) = torch.autograd.grad((x @ x).sin().sum(), x)
        assert torch.equal(ours, plain)


def test_inside_another_region_it_is_that_regions(away: Offload) -> None:
    del away
    net = make_net()
    inner = recollect.checkpoint(net, policy=offload_products)
    outer = recollect.checkpoint(lambda x: inner(x).sin())
    for seed in range(STEPS):
        plain, ours = step(net, lambda x: net(x).sin(), seed), step(net, outer, seed)
        assert all(map(torch.equal, plain, ours))


def test_a_block_is_recomputed_from_an_input_that_is_on_disk(tmp_path: Path) -> None:
    net, head = make_net(), nn.Linear(8, 8)
    block = recollect.checkpoint(net)
    grads, sent = [], []
    for call in (net, block):
        for seed in range(STEPS):
            torch.manual_seed(seed)
            x = torch.randn(16, 8)
            with recollect.offload("disk", min_bytes=0, directory=tmp_path / str(call is block)) as away:
                y = call(head(x).sin()).square().sum()
            y.backward()
            if seed == 0:
                sent.append(away.report().out_bytes)
        grads.append([p.grad.clone() for p in (*net.parameters(), *head.parameters()) if p.grad is not None])
        net.zero_grad()
        head.zero_grad()
    assert all(map(torch.equal, *grads))
    plain, recomputed = sent
    assert 0 < recomputed < plain


def test_explain_says_what_is_offloaded() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU())
    region = recollect.checkpoint(net, policy=offload_products, name="mlp")
    for _ in range(3):
        region(torch.ones(16, 8)).sum().backward()
    told = " ".join(str(recollect.explain(region)).split())
    assert "offloaded by offload_products" in told
    assert "of these offloaded: 1 value, 2.00 KiB" in told
    assert "recomputed by replaying what backward asks for, from 1 kept result" in told


@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_torchs_policies_offload(name: str) -> None:
    from recollect._offload.offload import offload_everything
    from recollect.compat import checkpoint, create_selective_checkpoint_contexts

    def policy(_: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.addmm.default
        return CheckpointPolicy[name] if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            net, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        return y

    net, sent = make_net(), []
    for seed in range(STEPS):
        plain, ours = step(net, net, seed), step(net, region, seed)
        assert all(map(torch.equal, plain, ours))
        sent.append(offload_everything().report().out_bytes)
    assert max(sent) > 0
