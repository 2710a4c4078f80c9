"""Collectives about activations inside regions, between two ranks: kept by default, so that nothing is sent again.

Those that give their result, and those that write into memory they are given, waited for at once or later; messages
between two ranks; dispatch of tokens to experts; attention in a ring.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.nn.functional import dropout, scaled_dot_product_attention

import recollect
from recollect import policies
from tests.distributed.comparing import count_collectives, repeated
from tests.distributed.launch import Ranks

SIZE = 2
functional: Any = importlib.import_module("torch.distributed._functional_collectives")


def world() -> Any:
    return distributed.group.WORLD


def other() -> int:
    return 1 - distributed.get_rank()


# Written by hand, around collectives that write into memory they are given.
class AllToAll(Function):
    is_async = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int] | None, received: list[int] | None) -> Tensor:
        ctx.splits = sent, received
        rows = x.shape[0] if received is None else sum(received)
        out = x.new_empty(rows, *x.shape[1:])
        work = distributed.all_to_all_single(out, x.contiguous(), received, sent, async_op=AllToAll.is_async)
        if work is not None:
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent, received = ctx.splits
        rows = gradient.shape[0] if sent is None else sum(sent)
        out = gradient.new_empty(rows, *gradient.shape[1:])
        distributed.all_to_all_single(out, gradient.contiguous(), sent, received)
        return out, None, None


class Reduce(Function):
    """Sums over ranks in place; its gradient is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Gather(Function):
    is_async = False
    into_list = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        if Gather.into_list:
            parts = [torch.empty_like(x) for _ in range(SIZE)]
            work = distributed.all_gather(parts, x, async_op=Gather.is_async)
        else:
            out = x.new_empty(SIZE * x.shape[0], *x.shape[1:])
            work = distributed.all_gather_into_tensor(out, x, async_op=Gather.is_async)
        if work is not None:
            work.wait()
        return torch.cat(parts) if Gather.into_list else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out = gradient.new_empty(gradient.shape[0] // SIZE, *gradient.shape[1:])
        distributed.reduce_scatter_tensor(out, gradient.contiguous())
        return out


class Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // SIZE, *x.shape[1:])
        distributed.reduce_scatter_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Gather.forward(ctx, gradient)


class Pass(Function):
    """Sends to the other rank and receives from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return exchange(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return exchange(gradient)


def exchange(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    messages = [
        distributed.P2POp(distributed.isend, x.contiguous(), other()),
        distributed.P2POp(distributed.irecv, out, other()),
    ]
    for work in distributed.batch_isend_irecv(messages):
        work.wait()
    return out


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        torch.manual_seed(3 + distributed.get_rank())
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = nn.Linear(8, SIZE)
        self.buffer = torch.empty(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x).sin()
        h = dropout(TALKS[self.kind](self, h), 0.2)
        return torch.tanh(self.second(h)).exp()


def route(layer: Layer, h: Tensor) -> tuple[Tensor, list[int], list[int], Tensor]:
    """Tokens sorted by the expert they go to, and how many go and come."""
    weights, chosen = layer.gate(h).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    sent = torch.bincount(chosen, minlength=SIZE)
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent)
    return (h * weights[:, None])[order], sent.tolist(), received.tolist(), order


def dispatch_by_hand(layer: Layer, h: Tensor) -> Tensor:
    tokens, sent, received, order = route(layer, h)
    here = layer.second(AllToAll.apply(tokens, sent, received)).relu()  # type: ignore[no-untyped-call]
    back: Tensor = AllToAll.apply(here, received, sent)  # type: ignore[no-untyped-call]
    return torch.zeros_like(back).index_copy(0, order, back)


def dispatch(layer: Layer, h: Tensor) -> Tensor:
    tokens, sent, received, order = route(layer, h)
    there = functional.all_to_all_single_autograd(tokens, received, sent, world())
    back = functional.all_to_all_single_autograd(layer.second(there).relu(), sent, received, world())
    return torch.zeros_like(back).index_copy(0, order, back)


def ring(layer: Layer, h: Tensor) -> Tensor:
    """Attention whose keys and values go round: scores of each block, put together by their sums of exponentials."""
    q, k = h[None, None], layer.first(h)[None, None]
    total = weights = torch.zeros(())
    for _ in range(SIZE):
        scores = (q @ k.transpose(-1, -2)).exp()
        total, weights = total + scores @ k, weights + scores.sum(-1, keepdim=True)
        k = Pass.apply(k)  # type: ignore[no-untyped-call]
    return (total / weights)[0, 0]


def functional_ring(layer: Layer, h: Tensor) -> Tensor:
    """The same with the functional collective that torch's own ring attention uses; no gradient goes through it."""
    q, k = h[None, None], layer.first(h)
    passed = functional.permute_tensor(k.detach().flatten(), [1, 0], world()).view(1, 1, *k.shape)
    out = scaled_dot_product_attention(q, k[None, None], k[None, None])
    return (out + scaled_dot_product_attention(q, passed, passed))[0, 0]


def functional_mix(_: Layer, h: Tensor) -> Tensor:
    total = functional.all_reduce(h.detach(), "sum", world())
    gathered = functional.all_gather_tensor(h.detach(), 0, world())
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, world())
    swapped = functional.all_to_all_single(h.detach(), None, None, world())
    return h * total + scattered.sin() * h + swapped  # type: ignore[no-any-return]


def functional_with_gradients(_: Layer, h: Tensor) -> Tensor:
    gathered = functional.all_gather_tensor_autograd(h, 0, world())
    return functional.reduce_scatter_tensor_autograd(gathered.sin(), "sum", 0, world()) + h  # type: ignore[no-any-return]


def unwaited(_: Layer, h: Tensor) -> Tensor:
    """A sum that is waited for by whoever reads it, after other work."""
    total = functional.reduce_scatter_tensor(torch.cat([h.detach(), h.detach()]), "sum", 0, world())
    h = h.cos() @ h.detach().T @ h
    return h * total  # type: ignore[no-any-return]


def late(_: Layer, h: Tensor) -> Tensor:
    out = torch.empty(2 * h.shape[0], 8)
    work: Any = distributed.all_gather_into_tensor(out, h.detach().contiguous(), async_op=True)
    h = h.cos()
    work.wait()
    return h * out[:4] + out[4:].sin() * h


def in_place_chain(_: Layer, h: Tensor) -> Tensor:
    """The same memory is summed, read, written and summed again."""
    buffer = h.detach().clone()
    distributed.all_reduce(buffer)
    first = h * buffer.clone()
    buffer.mul_(0.1)
    distributed.all_reduce(buffer)
    second = first.sin() * buffer.clone()
    buffer.zero_()
    return second.exp() * h


def borrowed(layer: Layer, h: Tensor) -> Tensor:
    """Into memory that the module has taken once, and uses again at each call."""
    distributed.all_to_all_single(layer.buffer, h.detach().contiguous())
    return h * layer.buffer.clone()


def objects(_: Layer, h: Tensor) -> Tensor:
    found: list[Any] = [None] * SIZE
    distributed.all_gather_object(found, {"rank": distributed.get_rank(), "scale": 1.5})
    distributed.barrier()
    scale = torch.tensor([2.0]) if distributed.get_rank() == 0 else torch.zeros(1)
    if distributed.get_rank() == 0:
        distributed.send(scale, 1)
    else:
        distributed.recv(scale, 0)
    distributed.broadcast(scale, 0)
    return h * found[0]["scale"] * scale  # type: ignore[no-any-return]


def listed(_: Layer, h: Tensor) -> Tensor:
    parts = [torch.empty(2, 8) for _ in range(SIZE)]
    distributed.all_gather(parts, h.detach()[:2])
    distributed.reduce(parts[0], 0)
    gathered = [torch.empty(2, 8) for _ in range(SIZE)] if distributed.get_rank() == 0 else None
    distributed.gather(parts[1], gathered, 0)
    mine = torch.empty(2, 8)
    distributed.scatter(mine, gathered, 0)
    return h.cos() * torch.cat([mine, parts[1]])


def by_function(function: Any) -> Callable[[Layer, Tensor], Tensor]:
    return lambda _, h: function.apply(h)


TALKS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "a sum in place": lambda _, h: Reduce.apply(h.clone()),  # type: ignore[no-untyped-call]
    "gathered": lambda _, h: Scatter.apply(Gather.apply(h).sin()),  # type: ignore[no-untyped-call]
    "all to all": lambda _, h: AllToAll.apply(h, None, None),  # type: ignore[no-untyped-call]
    "messages": by_function(Pass),
    "dispatch by hand": dispatch_by_hand,
    "dispatch": dispatch,
    "ring": ring,
    "functional ring": functional_ring,
    "functional": functional_mix,
    "functional with gradients": functional_with_gradients,
    "unwaited": unwaited,
    "late": late,
    "in place": in_place_chain,
    "borrowed": borrowed,
    "objects": objects,
    "listed": listed,
}
POLICIES: dict[str, Any] = {
    "nothing": policies.save_nothing,
    "matmuls": policies.save_matmuls,
    "all": policies.save_all,
}


def run(kind: str, keep: str | None, is_strict: bool = False) -> list[int]:
    warnings.filterwarnings("ignore", message="policy .* this step")
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer torch has new names for some collectives
    layers = [Layer(kind), Layer(kind)]
    layers[1].buffer = layers[0].buffer
    policy: Any = None if keep is None else POLICIES[keep]
    if is_strict:
        policy = policies.strictly(policy)
    regions = [recollect.checkpoint(layer, policy=policy) for layer in layers]
    parameters = [p for layer in layers for p in layer.parameters()]
    counts = repeated(
        lambda x: layers[1](layers[0](x)), lambda x: regions[1](regions[0](x)), parameters, shape=(4, 8), steps=4
    )
    return [count_collectives(count) for count in counts]


@pytest.mark.parametrize("keep", POLICIES)
@pytest.mark.parametrize("kind", TALKS)
def test_what_came_from_other_ranks_is_not_sent_again(ranks: Ranks, kind: str, keep: str) -> None:
    assert ranks.run(run, kind, keep) == [[0] * 4] * 2


@pytest.mark.parametrize("kind", ["a sum in place", "dispatch", "messages"])
def test_a_strict_policy_sends_it_again(ranks: Ranks, kind: str) -> None:
    for counts in ranks.run(run, kind, "nothing", True):
        assert min(counts) > 0


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_complaint_27_dispatch_of_tokens_to_experts_is_not_repeated(ranks: Ranks, is_by_hand: bool) -> None:
    assert ranks.run(run, "dispatch by hand" if is_by_hand else "dispatch", None) == [[0] * 4] * 2


# Ranks must never disagree about what is sent again.
class Mean(nn.Module):
    """Compares with the mean over ranks, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.talks = True

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x).sin()
        if self.talks:
            mean = h.detach().mean(0)
            distributed.all_reduce(mean)
            h = h - mean
        return self.second(h).exp()  # type: ignore[no-any-return]


def run_with_other_shapes(keep: str) -> list[int]:
    """Each rank meets each shape at a step of its own, so that they learn at different times."""
    warnings.filterwarnings("ignore", message="policy .* this step")
    module = Mean()
    region = recollect.checkpoint(module, policy=POLICIES[keep])
    found = []
    for number in range(5):
        rows = 4 + number if distributed.get_rank() == 0 else 4 + number // 2
        found += repeated(module, region, module.parameters(), shape=(rows, 8), steps=1)
    return [count_collectives(counts) for counts in found]


@pytest.mark.parametrize("keep", POLICIES)
def test_ranks_that_learn_at_different_steps_agree(ranks: Ranks, keep: str) -> None:
    assert ranks.run(run_with_other_shapes, keep) == [[0] * 5] * 2


def run_at_times(keep: str) -> tuple[list[int], str]:
    warnings.filterwarnings("ignore", message="policy .* this step")
    module = Mean()
    region = recollect.checkpoint(module, policy=POLICIES[keep])
    found = []
    for talks in (False, False, True, True, False, True):
        module.talks = talks
        found += repeated(module, region, module.parameters(), shape=(4, 8), steps=1)
    return [count_collectives(counts) for counts in found], str(recollect.explain(region))


@pytest.mark.parametrize("keep", POLICIES)
def test_a_region_that_begins_to_talk_repeats_it_once_and_is_watched_from_then_on(ranks: Ranks, keep: str) -> None:
    watched = "recomputed by running the function again under a dispatch mode"
    for counts, text in ranks.run(run_at_times, keep):
        assert counts[2] in (0, 1)
        assert counts[:2] + counts[3:] == [0] * 5
        assert ("nothing is recomputed" if keep == "all" else watched) in text


# What is waited for only after the region.
class Late(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind
        self.works: list[Any] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h: Tensor = self.first(x).sin()
        out = torch.empty_like(h) if self.kind == "messages" else h.detach().clone()
        if self.kind == "messages":
            self.works = [distributed.isend(h.detach(), other()), distributed.irecv(out, other())]
        elif self.kind == "sum":
            self.works = [distributed.all_reduce(out, async_op=True)]
        else:
            out = functional.all_reduce(out, "sum", world())
        return self.second(h).exp(), out


def run_late(kind: str) -> list[int]:
    warnings.filterwarnings("ignore", message="policy .* this step")
    module = Late(kind)
    region = recollect.checkpoint(module, policy=policies.save_nothing)

    def step(forward: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        y, out = forward(x)
        for work in module.works:
            work.wait()
        return y * out.sum()

    counts = repeated(lambda x: step(module, x), lambda x: step(region, x), module.parameters(), shape=(4, 8))
    return [count_collectives(count) for count in counts]


@pytest.mark.parametrize("kind", ["messages", "sum", "functional"])
def test_what_is_waited_for_after_the_region_is_not_sent_again(ranks: Ranks, kind: str) -> None:
    assert ranks.run(run_late, kind) == [[0] * 4] * 2


def run_nested(kind: str) -> list[int]:
    warnings.filterwarnings("ignore", message="policy .* this step")
    warnings.filterwarnings("ignore", category=FutureWarning)
    layers = [Layer(kind), Layer(kind)]
    inner = [recollect.checkpoint(layer, policy=policies.save_matmuls) for layer in layers]
    outer = recollect.checkpoint(lambda x: inner[1](inner[0](x)), policy=policies.save_nothing)
    parameters = [p for layer in layers for p in layer.parameters()]
    counts = repeated(lambda x: layers[1](layers[0](x)), outer, parameters, shape=(4, 8))
    return [count_collectives(count) for count in counts]


@pytest.mark.parametrize("kind", ["a sum in place", "dispatch by hand", "functional", "messages", "in place"])
def test_regions_within_regions_send_nothing_again(ranks: Ranks, kind: str) -> None:
    assert ranks.run(run_nested, kind) == [[0] * 4] * 2
