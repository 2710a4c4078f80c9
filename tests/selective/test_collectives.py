"""Collectives inside a region, in a process group of one: kept by default, so that backward does not repeat them.

Between two ranks: tests/distributed/test_collectives.py.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import policies
from recollect._core.operators import operator_of, talking
from recollect._selective.kept_call import KeptCall

pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")


@pytest.fixture
def group() -> Iterator[None]:
    store: Any = vars(distributed)["HashStore"]()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def shared(x: Tensor, w: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    h = (x @ w).sin()
    world: Any = distributed.group.WORLD
    total: Tensor = collectives.all_reduce(h.detach(), "sum", world)
    return (h * total).exp()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_matmuls, policies.save_collectives], ids=str)
def test_a_collective_is_not_repeated(policy: Any) -> None:
    assert repeated(policy) == [0, 0, 0]


@pytest.mark.usefixtures("group")
def test_a_strict_policy_repeats_it() -> None:
    assert repeated(policies.strictly(policies.save_matmuls)) == [1, 1, 1]


def repeated(policy: Any, function: Callable[[Tensor, Tensor], Tensor] = shared) -> list[int]:
    """How often backward talks to other processes, in each of three steps; its gradients are the plain ones."""
    found = []
    region = recollect.checkpoint(function, policy=policy)
    for _ in range(3):
        tensors = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
        loss = region(*tensors).sum()
        with Calls() as calls:
            gradients = torch.autograd.grad(loss, tensors)
        assert all(map(torch.equal, gradients, torch.autograd.grad(function(*tensors).sum(), tensors)))
        found.append(calls.counts["_c10d_functional.all_reduce.default"] + calls.counts["c10d.allreduce_.default"])
    return found


def summed_in_place(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    total = h.detach() * 2.0
    distributed.all_reduce(total)
    return (h * total).exp()


def summed_later(x: Tensor, w: Tensor) -> Tensor:
    total = (x.detach() @ w.detach()).cos()
    work = distributed.all_reduce(total, async_op=True)
    h = (x @ w).sin()
    assert work is not None
    work.wait()
    return (h * total).exp()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("function", [summed_in_place, summed_later])
@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_matmuls, policies.save_all], ids=str)
def test_one_that_writes_into_what_it_is_given_is_not_repeated(policy: Any, function: Any) -> None:
    assert repeated(policy, function) == [0, 0, 0]
    assert repeated(policies.strictly(policies.save_nothing), function) == [1, 1, 1]


@pytest.mark.usefixtures("group")
def test_what_is_kept_of_a_collective_is_explained() -> None:
    def explained(x: Tensor, w: Tensor) -> Tensor:
        return summed_in_place(x, w)

    region = recollect.checkpoint(explained, policy=policies.save_nothing)
    for _ in range(3):
        region(torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)).sum().backward()
    (call,) = recollect.explain(region).regions[0].calls
    (kept,) = call.kept
    assert (kept.what, kept.by) == ("c10d.allreduce_.default", "by default: collectives")
    assert (kept.shapes, kept.bytes, kept.matched) == (((4, 4),), 64, 3)
    assert call.way.startswith(
        "by running the function again under a dispatch mode; it has no program: it communicates with other processes"
    )


class Borrowing(nn.Module):
    """Receives into memory that it has taken once."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(4, 4)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        with torch.no_grad():
            distributed.all_to_all_single(self.memory, x.detach() * scale)
        return (x * self.memory.clone()).sin()


@pytest.mark.usefixtures("group")
def test_memory_that_is_used_again_by_the_next_call_does_not_change_what_is_kept() -> None:
    module = Borrowing()
    region = recollect.checkpoint(module, policy=policies.save_nothing)
    for _ in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad((region(x, 1.0) + region(x, 2.0)).sum(), x)
        (expected,) = torch.autograd.grad((module(x, 1.0) + module(x, 2.0)).sum(), x)
        assert torch.equal(gradient, expected)


def test_a_plan_is_not_followed_through_a_collective_that_was_not_in_it(group: None) -> None:
    del group
    talks = [False]

    def at_times(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).sin()
        total = h.detach() * 2.0
        if talks[0]:
            distributed.all_reduce(total)
        return (h * total).exp()

    region = recollect.checkpoint(at_times, policy=policies.save_matmuls)
    ways = []
    for talks[0] in (False, False, True, True):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
        region(x, w).sum().backward()
        ways.append(recollect.explain(region).regions[0].calls[0].way)
    assert ways[:2] == ["by replaying what backward asks for"] * 2
    assert "communicates with other processes in some calls and not in others" in ways[3]


ENGINE = """
def gather(module, args):
    import torch, torch.distributed
    with torch.no_grad():
        whole = torch.empty_like(module.weight)
        torch.distributed.all_reduce(whole.copy_(module.weight))
"""


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("who", "kept"), [("deepspeed.runtime.zero.stage3", 0), ("deepspeed.moe.sharded_moe", 1), ("somebody.else", 1)]
)
def test_gathers_of_parameters_are_told_by_who_asks_for_them(who: str, kept: int) -> None:
    space: dict[str, Any] = {"__name__": who}
    exec(ENGINE, space)
    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(space["gather"])
    region = recollect.checkpoint(module, policy=policies.save_all)
    region(torch.randn(2, 4)).sum().backward()
    (call,) = recollect.explain(region).regions[0].calls
    assert len([site for site in call.kept if site.what.startswith("c10d.")]) == kept


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("past", [True, False])
def test_a_kept_distributed_tensor_that_is_written_into_is_made_again(past: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))

    def function(x: Tensor) -> tuple[Any, Tensor]:
        kept: Any = DTensor.from_local(x, mesh, [Shard(0)]).sin()
        return kept, kept.cos().to_local()

    region = recollect.checkpoint(function, policy=policies.save_ops("aten.sin.default"))
    for _ in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        (expected,) = torch.autograd.grad(function(x)[1].sum(), x)
        kept, result = region(x)
        with torch.no_grad():
            (kept.to_local() if past else kept).zero_()
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, expected)


def test_a_view_that_talks_is_kept_as_what_it_gives() -> None:
    view = operator_of(torch.ops.aten.view.default)
    assert not view.can_be_kept
    assert talking(view).can_be_kept
    written = talking(operator_of(torch.ops.aten.add_.Tensor))
    assert written.can_be_kept
    assert written.fills


def count_kept() -> int:
    return sum(type(thing) is KeptCall for thing in gc.get_objects())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("goes_back", [True, False])
@pytest.mark.parametrize("function", [shared, summed_in_place, summed_later])
def test_what_is_kept_of_a_collective_goes_without_the_garbage_collector(function: Any, goes_back: bool) -> None:
    region: Any = recollect.checkpoint(function, policy=policies.save_nothing)
    gc.collect()
    gc.disable()
    before = count_kept()  # of other tests, whose graphs pytest may hold
    try:
        for _ in range(3):
            x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
            result = region(x, w)
            assert count_kept() > before
            if goes_back:
                result.sum().backward()
            del result
            give_up = monotonic() + 30  # the process group's own thread may still hold its work
            while count_kept() > before and monotonic() < give_up:
                sleep(0.01)
            assert count_kept() <= before
    finally:
        gc.enable()
