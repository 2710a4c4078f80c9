"""Threads do not see each other's settings, and regions that run at the same time give right gradients."""

import copy
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from tests.watching import Counted, RunsToItsEnd, backward

THREADS = 4
ROUNDS = 10


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def at_once(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each function in a thread of its own, all started at one moment; their results."""
    barrier = threading.Barrier(len(functions))

    def start(function: Callable[[], Any]) -> Any:
        barrier.wait(timeout=60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(start, function) for function in functions]]


# Settings


def ends_reached() -> int:
    fn = RunsToItsEnd()
    backward(recollect.checkpoint(fn)(torch.ones(2, requires_grad=True)).sum())
    return fn.ends


def mismatch() -> str:
    region = recollect.checkpoint(lambda x: x[: 1 if recollect.is_recomputing() else 2].exp())
    loss = region(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(recollect.MismatchError) as caught:
        backward(loss)
    return str(caught.value)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any, Any]] = {
    "early stop": (lambda: compat.set_checkpoint_early_stop(False), ends_reached, 1, 2),
    "explanations": (recollect.explain_mismatch, lambda: "came from:" in mismatch(), False, True),
    "debug": (lambda: compat.set_checkpoint_debug_enabled(True), lambda: "came from:" in mismatch(), False, True),
}


@pytest.mark.parametrize(("setting", "observe", "without", "within"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_holds_on_its_own_thread_only(
    setting: Callable[[], Any], observe: Callable[[], Any], without: Any, within: Any
) -> None:
    def observe_within() -> Any:
        with setting():
            return observe()

    with setting():
        assert in_another_thread(observe) == without
        assert observe() == within
    assert in_another_thread(observe_within) == within
    assert observe() == without


def test_only_the_thread_that_recomputes_says_so() -> None:
    answers = []

    def fn(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            answers.append(in_another_thread(recollect.is_recomputing))
        return x.exp()

    backward(recollect.checkpoint(fn)(torch.ones(2, requires_grad=True)).sum())
    assert answers == [False]


def test_groups_are_open_on_their_own_thread_only() -> None:
    def enter() -> bool:
        with compat.GraphExecGroup():
            return True

    with compat.GraphExecGroup():
        assert in_another_thread(enter)


def test_a_setting_of_forward_reaches_a_recomputation_on_another_thread() -> None:
    inner = Counted(lambda x: x.exp().sin())
    with compat.set_checkpoint_early_stop(False):
        loss = recollect.checkpoint(lambda x: recollect.checkpoint(inner)(x.cos()))(
            torch.ones(2).requires_grad_()
        ).sum()
    in_another_thread(lambda: backward(loss))
    assert inner.calls == 3


# Steps at the same time


class Block(nn.Module):
    """Draws its noise from the generator it is given, because threads share the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor, *, generator: torch.Generator) -> Any:
        noise = torch.rand(x.shape, generator=generator)
        return self.layers(x * noise).exp() * noise


def train(block: nn.Module, region: Callable[..., Any], seed: int) -> list[Tensor]:
    """Gradients of several steps, summed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator)
    totals = [torch.zeros_like(parameter) for parameter in block.parameters()]
    for _ in range(ROUNDS):
        loss = region(region(x, generator=generator).tanh(), generator=generator).sum()
        gradients = torch.autograd.grad(loss, list(block.parameters()))
        totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
    return totals


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def blocks_of_their_own() -> list[Block]:
    return [Block() for _ in range(THREADS)]


def replicas_of_one() -> list[Block]:
    """Modules of their own that share their parameters, as DataParallel makes them."""
    block = Block()
    shared = {id(parameter): parameter for parameter in block.parameters()}
    return [copy.deepcopy(block, dict(shared)) for _ in range(THREADS)]


def one_for_all() -> list[Block]:
    return [Block().eval()] * THREADS


@pytest.mark.parametrize("make", [blocks_of_their_own, replicas_of_one, one_for_all])
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"check": "values"}], ids=str)
def test_training_steps_at_the_same_time_give_right_gradients(
    make: Callable[[], list[Block]], options: dict[str, Any]
) -> None:
    blocks = make()
    expected = []
    for seed, block in enumerate(blocks):
        twin = copy.deepcopy(block)
        expected.append((train(twin, twin, seed), list(twin.buffers())))
    results = at_once(
        [
            functools.partial(train, block, recollect.checkpoint(block, **options), seed)
            for seed, block in enumerate(blocks)
        ]
    )
    for result, block, (gradients, buffers) in zip(results, blocks, expected, strict=True):
        assert_equal(result, gradients)
        assert_equal(list(block.buffers()), buffers)


@pytest.mark.parametrize("nested", [False, True])
def test_backward_passes_through_one_graph_at_the_same_time(nested: bool) -> None:
    x = torch.randn(8, requires_grad=True)
    inner = Counted(lambda x: x.sin().exp().tanh())
    region: Callable[[Tensor], Tensor] = recollect.checkpoint(inner)
    if nested:
        region = recollect.checkpoint(lambda x: recollect.checkpoint(inner)(x.cos()).sin())
    loss = region(x).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    derive: Callable[[], Any] = functools.partial(torch.autograd.grad, loss, x, retain_graph=True)
    for _ in range(ROUNDS):
        results = at_once([derive] * THREADS)
        for (gradient,) in results:
            assert torch.equal(gradient, expected)


def test_passes_that_ask_at_the_same_time_recompute_one_after_the_other() -> None:
    inside, met = list[int](), threading.Event()

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        if recollect.is_recomputing():
            inside.append(1)
            if len(inside) > 1:
                met.set()
            met.wait(timeout=0.1)  # gives another thread the time to come in, if it can
            inside.pop()
        return y

    x = torch.randn(8, requires_grad=True)
    loss = recollect.checkpoint(fn, early_stop=False)(x).sum()
    derive: Callable[[], Any] = functools.partial(torch.autograd.grad, loss, x, retain_graph=True)
    at_once([derive] * 2)
    assert not met.is_set()


def test_backward_on_another_thread_than_forward() -> None:
    block, seed = Block().eval(), 5
    generator = torch.Generator()
    x = torch.randn(3, 6)
    gradients = []
    for run in (block, recollect.checkpoint(block)):
        generator.manual_seed(seed)
        block.zero_grad()
        loss = run(x, generator=generator).sum()
        in_another_thread(functools.partial(backward, loss))
        gradients.append([parameter.grad for parameter in block.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(block.parameters()))
    assert_equal(*gradients)


def test_an_exception_on_one_thread_does_not_disturb_another() -> None:
    x = torch.randn(4, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)

    def good() -> None:
        for _ in range(ROUNDS):
            (gradient,) = torch.autograd.grad(recollect.checkpoint(lambda x: x.exp().sin())(x).sum(), x)
            assert torch.equal(gradient, expected)

    def bad() -> None:
        for _ in range(ROUNDS):
            mismatch()

    at_once([good, bad] * 2)


def test_a_profile_leaves_alone_what_another_thread_trains_meanwhile() -> None:
    theirs = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    expected = copy.deepcopy(theirs)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    x, steps = torch.ones(2, 4), list[None]()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model(x).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    class Meanwhile(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            in_another_thread(lambda: train(theirs, optimizer))
            steps.append(None)
            return super().forward(x)

    seen = recollect.profile(Meanwhile(4, 4), x)
    for _ in steps:
        train(expected, reference)
    assert_equal(list(theirs.parameters()), list(expected.parameters()))
    assert seen.optimizer == ""


def test_profiles_at_the_same_time_leave_the_garbage_collector_as_it_was() -> None:
    before = gc.get_threshold()
    entered, left = threading.Event(), threading.Event()

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            entered.wait(60)  # the other one has begun
            return super().forward(x)

    class Second(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            left.wait(60)  # the first is over
            return super().forward(x)

    def first() -> None:
        recollect.profile(First(2, 2), torch.ones(1, 2), timed=False)
        left.set()

    at_once([first, lambda: recollect.profile(Second(2, 2), torch.ones(1, 2), timed=False)])
    assert gc.get_threshold() == before
