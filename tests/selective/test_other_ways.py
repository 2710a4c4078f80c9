"""Calls that differ from those the policy was asked about: what was learned must not be taken for what happens now."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, policies
from recollect._policy.base import PolicyLike
from tests.selective.comparing import SIZE, square
from tests.trying import try_all

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

POLICIES: dict[str, PolicyLike] = {
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "products": policies.save_matmuls,
    "every second": policies.save_every(("aten.mm.default", "aten.sin.default", "aten.mul.Tensor"), 2),
    "block": policies.save_names("part"),
    "name": policies.save_names("h"),
    "coin": lambda site: Decision.SAVE if (len(site.op) + site.call) % 2 else Decision.RECOMPUTE,
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)

part: Callable[[Tensor, Tensor], Tensor] = recollect.region("part")(lambda x, w: recollect.name(x @ w, "h").sin())


def assert_same_gradients(region: Callable[..., Any], plain: Callable[..., Any], args: list[Any], seed: int) -> None:
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    gradients = []
    for fn in (plain, region):
        torch.manual_seed(seed)
        gradients.append(torch.autograd.grad(fn(*args).double().cos().sum(), wanted, allow_unused=True))
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


Way = Callable[[Tensor, Tensor, int], Tensor]


def branch(x: Tensor, w: Tensor, n: int) -> Tensor:
    return (part(x, w) @ w).tanh().sin() if n % 2 else part(x.exp(), w).tanh()


def branch_of_the_same_shape(x: Tensor, w: Tensor, n: int) -> Tensor:
    return part(x, w).tanh() @ w if n % 2 else part(w, x).tanh() @ x


def branch_on_data(x: Tensor, w: Tensor, _n: int) -> Tensor:
    return part(x, w).exp().sin() if x.sum() > 0 else part(x, w).tanh().sin()


def more_and_more(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(1 + n):
        x = part(x, w)
    return x


def less_and_less(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(8 - n):
        x = part(x, w)
    return x


def numbers(x: Tensor, w: Tensor, n: int) -> Tensor:
    return ((part(x, w) * n).sin() / (n + 1)).clamp(-0.1 * n, 0.2 * n).pow(1 + n % 3)


def numbers_out_of_tensors(x: Tensor, w: Tensor, _n: int) -> Tensor:
    h = part(x, w)
    return (h * h.max().item()).sin() + float(h.detach().sum())


def lists_of_numbers(x: Tensor, w: Tensor, n: int) -> Tensor:
    return part(x, w).sin()[[n % SIZE, (n + 1) % SIZE]].roll([n, 1], [0, 1]).exp()


def other_indices(x: Tensor, w: Tensor, n: int) -> Tensor:
    return part(x, w)[torch.tensor([n % SIZE, 0, 1, n % 2])].sin() @ w[:, n % SIZE :].sum(1, keepdim=True)


def slices(x: Tensor, w: Tensor, n: int) -> Tensor:
    return part(x, w).sin()[n % SIZE].exp() * w[:, n % SIZE]


def made_inside(x: Tensor, w: Tensor, n: int) -> Tensor:
    return (part(x, w) * torch.full((SIZE,), float(n)).add(torch.arange(SIZE)) + torch.eye(SIZE)).sin()


def from_numpy(x: Tensor, w: Tensor, n: int) -> Tensor:
    import numpy as np

    return (part(x, w) * torch.from_numpy(np.full((SIZE, SIZE), n, dtype=np.float32))).sin().exp()


def through_data(x: Tensor, w: Tensor, n: int) -> Tensor:
    h = part(x, w)
    h.data.mul_(n + 1)
    return (h + 1).tanh().sin()


def writes_sometimes(x: Tensor, w: Tensor, n: int) -> Tensor:
    h = part(x, w) + 1
    if n % 2:
        h.mul_(2)
    return h.sin().exp()


def draws_sometimes(x: Tensor, w: Tensor, n: int) -> Tensor:
    h = part(x, w)
    return (torch.dropout(h, 0.5, train=n % 2 == 1) * torch.rand(SIZE)).sin().exp()


def random_or_not(x: Tensor, w: Tensor, n: int) -> Tensor:
    noise = torch.rand(SIZE) if n % 2 else torch.ones(SIZE)
    return (part(x, w) * noise * torch.rand(SIZE)).sin()


def other_dtype(x: Tensor, w: Tensor, n: int) -> Tensor:
    kind = torch.float64 if n % 2 else torch.float32
    return part(x.to(kind), w.to(kind)).exp().sin()


def detached_sometimes(x: Tensor, w: Tensor, n: int) -> Tensor:
    h = part(x, w)
    return ((h.detach() if n % 2 else h.view_as(h)) * h).sin()


def no_grad_sometimes(x: Tensor, w: Tensor, n: int) -> Tensor:
    with torch.set_grad_enabled(n % 2 == 0):
        h = part(x, w)
    return (part(x, w) * h).sin()


def autocast_sometimes(x: Tensor, w: Tensor, n: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=n % 2 == 1):
        return part(part(x, w), w).sin().exp()


def transformed(x: Tensor, w: Tensor, n: int) -> Tensor:
    h: Tensor = torch.vmap(lambda row: (row @ w).sin() * n)(x)
    return part(h, w).exp()


def raises_inside(x: Tensor, w: Tensor, n: int) -> Tensor:
    try:
        h = part(x, w[: SIZE - n % 2])
    except RuntimeError:
        h = part(w, x)
    return h.exp().sin()


def set_attributes(x: Tensor, w: Tensor, n: int) -> Tensor:
    h = part(x, w).detach()
    h.requires_grad_(n % 2 == 0)
    return (h.exp() * part(x, w)).sin()


def set_data(x: Tensor, w: Tensor, n: int) -> Tensor:
    h = torch.zeros(SIZE, SIZE)
    h.data = part(x.detach(), w.detach()) * n
    return (h * part(x, w)).sin()


def gradient_inside(x: Tensor, w: Tensor, n: int) -> Tensor:
    inner = x.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad((part(inner, w.detach()) * n).sum(), inner)
    return (part(x, w) * slope).sin().exp()


WAYS: list[Way] = [
    branch,
    branch_of_the_same_shape,
    branch_on_data,
    more_and_more,
    less_and_less,
    numbers,
    numbers_out_of_tensors,
    lists_of_numbers,
    other_indices,
    slices,
    made_inside,
    from_numpy,
    through_data,
    writes_sometimes,
    draws_sometimes,
    random_or_not,
    other_dtype,
    detached_sometimes,
    no_grad_sometimes,
    autocast_sometimes,
    transformed,
    raises_inside,
    set_attributes,
    set_data,
    gradient_inside,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_differs_from_those_before(way: Way) -> None:
    try_all(lambda variant: assert_same_calls(way, *variant), itertools.product(POLICIES, [0, 1], [False, True]))


def assert_same_calls(way: Way, name: str, first: int, is_told: bool) -> None:
    policy = POLICIES[name]
    number = first  # an argument of the region, or known to its function alone
    told = recollect.checkpoint(way, policy=policy)
    untold = recollect.checkpoint(lambda x, w: way(x, w, number), policy=policy)
    for step in range(6):
        torch.manual_seed(step)
        args = [square().detach().div(2).requires_grad_() for _ in range(2)]
        number = first + step
        if is_told:
            assert_same_gradients(told, way, [*args, number], step)
        else:
            assert_same_gradients(untold, lambda x, w: way(x, w, number), args, step)  # noqa: B023


@each_policy
def test_arguments_that_require_grad_sometimes(policy: PolicyLike) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (part(x, w).exp() @ v).sin()

    region = recollect.checkpoint(fn, policy=policy)
    for step in range(8):
        torch.manual_seed(step)
        args = [torch.randn(SIZE, SIZE, requires_grad=bool(step >> i & 1)) for i in range(2)]
        assert_same_gradients(region, fn, [*args, square()], step)


@each_policy
def test_parameters_that_are_frozen_and_thawed(policy: PolicyLike) -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Sigmoid())
    region = recollect.checkpoint(net, policy=policy)
    for step in range(8):
        net[0].requires_grad_(bool(step & 1))
        net[2].requires_grad_(bool(step & 2))
        x = torch.randn(2, SIZE, requires_grad=True)
        wanted = [x, *(p for p in net.parameters() if p.requires_grad)]
        gradients = [torch.autograd.grad(fn(x).sum(), wanted) for fn in (net, region)]
        assert all(map(torch.equal, *gradients))


@each_policy
def test_a_function_made_anew_at_each_call_over_other_tensors(policy: PolicyLike) -> None:
    for step in range(4):
        scale, bias = square(), square().detach()

        def fn(x: Tensor, w: Tensor, scale: Tensor = scale, bias: Tensor = bias) -> Tensor:
            return (part(x, w) * scale + bias).sin().exp()

        assert_same_gradients(recollect.checkpoint(fn, policy=policy), fn, [square(), square()], step)


@each_policy
def test_one_function_under_two_names_and_two_policies(policy: PolicyLike) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return part(part(x, w), w).exp().sin()

    regions = [
        recollect.checkpoint(fn, policy=policy, name="one"),
        recollect.checkpoint(fn, policy=policy, name="other"),
        recollect.checkpoint(fn, policy=policies.save_all),
        recollect.checkpoint(fn),
    ]
    for step in range(12):
        assert_same_gradients(regions[step % 4], fn, [square(), square()], step)


@each_policy
def test_steps_that_overlap(policy: PolicyLike) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (part(part(x, w), w).exp() * torch.rand(SIZE)).sin()

    region = recollect.checkpoint(fn, policy=policy)
    for _ in range(3):
        pending = []
        for seed in range(3):
            x, w = square(), square()
            torch.manual_seed(seed)
            expected = torch.autograd.grad(fn(x, w).sum(), [x, w])
            torch.manual_seed(seed)
            pending.append((region(x, w).sum(), [x, w], expected))
        for loss, wanted, expected in reversed(pending):
            assert all(map(torch.equal, torch.autograd.grad(loss, wanted), expected))
