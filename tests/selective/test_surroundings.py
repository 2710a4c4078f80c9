"""What stands around and inside a region under a policy: hooks, autocast, generators, options, later changes."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect import Decision, policies
from recollect._policy.base import PolicyLike
from tests.selective.comparing import SIZE, STEPS, assert_like_plain, square, squares
from tests.watching import backward, what_is_in_force

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

POLICIES: dict[str, PolicyLike] = {
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "products": policies.save_matmuls,
    "random": policies.save_random,
    "name": policies.save_names("h"),
    "block": policies.save_names("part"),
    "coin": lambda site: Decision.SAVE if (len(site.op) + site.call) % 2 else Decision.RECOMPUTE,
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
twice_or_once = pytest.mark.parametrize("twice", [False, True])


@recollect.region("part")
def part(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(recollect.name(x @ w, "h"), 0.3).sin()


def block(x: Tensor, w: Tensor) -> Tensor:
    return part(part(x, w).exp(), w).tanh() * torch.rand(SIZE)


# Hooks on saved tensors, of the user's own

HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "save on cpu": save_on_cpu,
    "copies": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "negated": lambda: saved_tensors_hooks(
        lambda x: -x if x.is_floating_point() else x, lambda x: -x if x.is_floating_point() else x
    ),
}
each_hook = pytest.mark.parametrize("hook", HOOKS)


def under(context: Callable[[], AbstractContextManager[Any]], fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with context():
            return fn(*args)

    return call


@each_policy
@each_hook
@twice_or_once
def test_hooks_inside_the_region(policy: PolicyLike, hook: str, twice: bool) -> None:
    inner = under(HOOKS[hook], part)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = inner(part(x, w), w).exp()
        return part(y, w).tanh()

    assert_like_plain(fn, policy, squares(2), twice=twice)


@each_policy
@each_hook
@twice_or_once
def test_hooks_inside_a_kept_or_recomputed_block(policy: PolicyLike, hook: str, twice: bool) -> None:
    named = recollect.region("part")(under(HOOKS[hook], lambda x, w: (x @ w).sin()))
    assert_like_plain(lambda x, w: named(named(x, w).exp(), w).tanh(), policy, squares(2), twice=twice)


@each_policy
@each_hook
@twice_or_once
def test_hooks_around_the_region(policy: PolicyLike, hook: str, twice: bool) -> None:
    region = recollect.checkpoint(block, policy=policy)
    for step in range(STEPS):
        x, w = square(), square()
        gradients = []
        for fn in (block, region):
            torch.manual_seed(step)
            loss = under(HOOKS[hook], fn)(x, w).sum()
            if twice:
                torch.autograd.grad(loss, [x, w], retain_graph=True)
            gradients.append(torch.autograd.grad(loss, [x, w]))
        assert all(map(torch.equal, *gradients))


@each_policy
def test_hooks_around_the_region_see_what_it_keeps(policy: PolicyLike) -> None:
    region = recollect.checkpoint(lambda x, w: (x @ w).sin().exp(), policy=policy)
    for _ in range(STEPS):
        packed: list[int] = []

        def pack(x: Tensor, packed: list[int] = packed) -> Tensor:
            packed.append(x.numel())
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            backward(region(square(), square()).sum())
        assert packed


# Autocast, modes, generators


@each_policy
@twice_or_once
@pytest.mark.parametrize("cache", [False, True])
def test_autocast_around_the_region(policy: PolicyLike, twice: bool, cache: bool) -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.3), nn.Tanh(), nn.Linear(SIZE, SIZE))
    region = recollect.checkpoint(net, policy=policy)
    for step in range(STEPS):
        x = square()
        gradients = []
        for fn in (net, region):
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                loss = (fn(x) @ x).sum()
            if twice:
                torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True)
            gradients.append(torch.autograd.grad(loss, [x, *net.parameters()]))
        assert all(map(torch.equal, *gradients))


@each_policy
@twice_or_once
def test_autocast_inside_the_region_and_around_a_block(policy: PolicyLike, twice: bool) -> None:
    low = under(lambda: torch.autocast("cpu", dtype=torch.bfloat16), part)
    high = under(lambda: torch.autocast("cpu", enabled=False), lambda x, w: part(x.float(), w))
    assert_like_plain(lambda x, w: high(low(x, w).exp(), w).tanh(), policy, squares(2), twice=twice)


@each_policy
def test_grad_mode_inside_the_region(policy: PolicyLike) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = part(x, w)
        with torch.no_grad():
            scale = part(h, w).exp().sum()
            with torch.enable_grad():
                inner = part(h * scale.sigmoid(), w)
        return (inner / scale).tanh() + h

    assert_like_plain(fn, policy, squares(2))
    assert_like_plain(fn, policy, squares(2), twice=True)


@each_policy
def test_without_grad_mode_nothing_is_kept_and_the_call_is_plain(policy: PolicyLike) -> None:
    region, x, w = recollect.checkpoint(block, policy=policy), square(), square()
    for step in range(STEPS):
        with torch.no_grad():
            torch.manual_seed(step)
            plain = block(x, w)
            torch.manual_seed(step)
            assert torch.equal(region(x, w), plain)


@each_policy
def test_calls_with_and_without_grad_mode_and_of_other_shapes_take_turns(policy: PolicyLike) -> None:
    region = recollect.checkpoint(lambda x, w: (part(x, w).exp() @ w).sin(), policy=policy)
    for step in range(3 * STEPS):
        x, w = torch.randn(2 + step % 2, SIZE, requires_grad=True), square()
        with torch.set_grad_enabled(step % 3 != 2):
            outputs = []
            for fn in (region, region.__wrapped__):  # type: ignore[attr-defined]
                torch.manual_seed(step)
                outputs.append(fn(x, w))
        assert torch.equal(*outputs)
        if outputs[0].requires_grad:
            gradients = [torch.autograd.grad(output.sum(), [x, w]) for output in outputs]
            assert all(map(torch.equal, *gradients))


@each_policy
def test_a_generator_among_the_arguments(policy: PolicyLike) -> None:
    named = recollect.region("part")(lambda x, g: (x * torch.rand(SIZE, generator=g)).sin())

    def fn(x: Tensor, g: torch.Generator) -> Tensor:
        y: Tensor = named(named(x, g).exp(), g).tanh() * torch.rand(SIZE, generator=g)
        return y

    region = recollect.checkpoint(fn, policy=policy)
    for step in range(STEPS):
        x = square()
        gradients, states = [], []
        for call in (fn, region):
            generator = torch.Generator().manual_seed(step)
            loss = call(x, generator).sum()
            torch.rand(1, generator=generator)
            gradients.append(torch.autograd.grad(loss, x)[0])
            states.append(generator.get_state())
        assert torch.equal(*gradients)
        assert torch.equal(*states)


@each_policy
def test_pythons_generator_is_put_back_where_a_kept_block_drew_from_it(policy: PolicyLike) -> None:
    named = recollect.region("part")(lambda x: (x * random.random()).sin())

    def fn(x: Tensor) -> Tensor:
        y: Tensor = named(named(x).exp()).tanh() * random.random()
        return y.sin() * random.random()

    region = recollect.checkpoint(fn, policy=policy, preserve_rng=["torch", "python"])
    for step in range(STEPS):
        x = square()
        gradients, states = [], []
        for call in (fn, region):
            random.seed(step)
            loss = call(x).sum()
            random.random()
            gradients.append(torch.autograd.grad(loss, x)[0])
            states.append(random.getstate())
        assert torch.equal(*gradients)
        assert states[0] == states[1]


# Options


@each_policy
@pytest.mark.parametrize("options", [{"early_stop": False}, {"check": "values"}, {"check": "none"}], ids=str)
def test_options(policy: PolicyLike, options: dict[str, Any]) -> None:
    assert_like_plain(block, policy, squares(2), **options)


@each_policy
def test_under_explain_mismatch(policy: PolicyLike) -> None:
    with recollect.explain_mismatch():
        assert_like_plain(block, policy, squares(2))


@each_policy
def test_as_a_decorator(policy: PolicyLike) -> None:
    @recollect.checkpoint(policy=policy, name="decorated")
    def decorated(x: Tensor, w: Tensor) -> Tensor:
        return (part(x, w) @ w).sin()

    for step in range(STEPS):
        x, w = square(), square()
        torch.manual_seed(step)
        plain = torch.autograd.grad((part(x, w) @ w).sin().sum(), [x, w])
        torch.manual_seed(step)
        assert all(map(torch.equal, torch.autograd.grad(decorated(x, w).sum(), [x, w]), plain))


# Between forward and backward


@each_policy
def test_a_parameter_that_changed_since_forward_is_refused_or_makes_no_difference(policy: PolicyLike) -> None:
    first, second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
    region = recollect.checkpoint(net, policy=policy)
    for _ in range(STEPS):
        x = square()
        expected = torch.autograd.grad(net(x).sum(), x)
        loss = region(x).sum()
        with torch.no_grad():
            for bias in (first.bias, second.bias):
                bias.add_(0.125)  # autograd saves no bias, so the plain step would not mind
        try:
            (gradient,) = torch.autograd.grad(loss, x)
        except recollect.CheckpointError:
            continue
        assert torch.equal(gradient, expected[0])


@each_policy
def test_training_mode_that_changed_since_forward_makes_no_difference(policy: PolicyLike) -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5), nn.BatchNorm1d(SIZE), nn.Tanh(), nn.Dropout(0.5))
    region = recollect.checkpoint(net, policy=policy)
    for step in range(STEPS):
        x = square()
        gradients = []
        for fn in (net, region):
            net.train()
            torch.manual_seed(step)
            loss = fn(x).sum()
            net.train(mode=fn is net)
            gradients.append(torch.autograd.grad(loss, [x, *net.parameters()]))
        net.train()
        assert all(map(torch.equal, *gradients))


# Exceptions in backward


@each_policy
@pytest.mark.parametrize("before", range(STEPS))
def test_a_backward_that_fails_leaves_nothing_in_force_and_can_be_repeated(policy: PolicyLike, before: int) -> None:
    region = recollect.checkpoint(block, policy=policy)
    for _ in range(before):
        backward(region(square(), square()).sum())
    x, w = square(), square()
    torch.manual_seed(0)
    expected = torch.autograd.grad(block(x, w).sum(), [x, w])
    torch.manual_seed(0)
    loss = region(x, w).sum()
    in_force = what_is_in_force()
    handle = w.register_hook(lambda _: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(loss, [x, w], retain_graph=True)
        assert what_is_in_force() == in_force
    handle.remove()
    assert all(map(torch.equal, torch.autograd.grad(loss, [x, w]), expected))
