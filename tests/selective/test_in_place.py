"""Writes in place into kept values, after kept values, and by kept blocks: right, or refused; never silently wrong."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, policies
from recollect._policy.base import PolicyLike
from tests.selective.comparing import SIZE, STEPS, assert_like_plain, square, squares
from tests.trying import try_all
from tests.watching import backward

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

PRODUCTS: dict[str, PolicyLike] = {
    "operator": policies.save_ops("aten.mm.default"),
    "all": policies.save_all,
    "nothing": policies.save_nothing,
    "function": lambda site: Decision.SAVE if site.op == "aten.mm.default" else Decision.RECOMPUTE,
    "not the product": lambda site: Decision.RECOMPUTE if site.op == "aten.mm.default" else Decision.SAVE,
    "name": policies.save_names("h"),
    "block": policies.save_names("product"),
}
each_policy = pytest.mark.parametrize("policy", PRODUCTS.values(), ids=PRODUCTS)


@recollect.region("product")
def product(x: Tensor, w: Tensor) -> Tensor:
    return recollect.name(x @ w, "h")


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda h, _: h.add_(1),
    "relu_": lambda h, _: h.relu_(),
    "chain": lambda h, _: h.mul_(2).add_(1).sigmoid_(),
    "other": lambda h, x: h.mul_(x),
    "through a view": lambda h, _: (h.view(-1)[::2].mul_(3), h)[1],
    "through a transpose": lambda h, x: (h.t().add_(x), h)[1],
    "index": lambda h, x: (h[0].copy_(x[1]), h)[1],
    "masked": lambda h, x: h.masked_fill_(x > 0, 0.5),
    "zero a row": lambda h, _: (h[0].zero_(), h)[1],
    "random": lambda h, _: h.mul_(torch.empty(SIZE, SIZE).uniform_(0.5, 2)),
    "dropout": lambda h, _: nn.functional.dropout(h, 0.5, inplace=True),
    "out": lambda h, x: torch.add(h.detach(), x.detach(), out=torch.zeros(SIZE, SIZE)) * h,
}
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@each_write
def test_a_write_right_after_the_kept_value_is_made(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return write(product(x, w), x).sin().exp()

    def check(variant: tuple[str, bool]) -> None:
        name, twice = variant
        assert_like_plain(fn, PRODUCTS[name], squares(2), twice=twice)

    try_all(check, itertools.product(PRODUCTS, [False, True]))


@each_write
def test_a_write_after_the_kept_value_was_read(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = product(x, w)
        before = (h + 1).tanh()  # reads it, and saves nothing of it
        return before * write(h, x).exp()

    try_all(lambda name: assert_like_plain(fn, PRODUCTS[name], squares(2)), PRODUCTS)


@each_policy
def test_a_write_into_the_result_after_the_region_ended(policy: PolicyLike) -> None:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return product(x.exp(), w)

    region = recollect.checkpoint(plain, policy=policy)
    for _ in range(STEPS):
        x, w = square(), square()
        ours, theirs = [torch.autograd.grad(fn(x, w).mul_(2).sin().sum(), [x, w]) for fn in (region, plain)]
        assert all(map(torch.equal, ours, theirs))


@each_policy
def test_a_write_after_the_region_ended_into_what_recomputation_needs_is_right_or_refused(policy: PolicyLike) -> None:
    def plain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = product(x, w)
        return h, (h + 1).tanh().exp()

    region = recollect.checkpoint(plain, policy=policy)
    for _ in range(STEPS):
        x, w = square(), square()
        gradients = []
        for fn in (plain, region):
            h, y = fn(x, w)
            h.mul_(2)
            try:
                gradients.append(torch.autograd.grad((y * h).sum(), [x, w]))
            except recollect.CheckpointError:
                return
        assert all(map(torch.equal, *gradients))


@each_policy
def test_what_plain_autograd_refuses_is_refused_or_right(policy: PolicyLike) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = product(x, w)
        y = h.sin()  # saves h
        h.add_(1)
        return y * h

    region = recollect.checkpoint(fn, policy=policy)
    for _ in range(STEPS):
        x, w = square(), square()
        with pytest.raises(RuntimeError, match=r"(modified by an inplace operation|changed in place|written)"):
            backward(region(x, w).sum())


# Kept modules


class Writes(nn.Module):
    """A linear layer, whose result is written into by what follows, and a module that writes into what it is given."""

    def __init__(self, *, activation: nn.Module, is_written: bool) -> None:
        super().__init__()
        self.linear, self.activation, self.last = nn.Linear(SIZE, SIZE), activation, nn.Linear(SIZE, SIZE)
        self._is_written = is_written

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x.sin())
        if self._is_written:
            h.mul_(2)
        y: Tensor = self.last(self.activation(h)).tanh()
        return y


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "dropout in place": lambda: nn.Dropout(0.5, inplace=True),
    "rrelu in place": lambda: nn.RReLU(inplace=True),
    "tanh": nn.Tanh,
    "batch norm": lambda: nn.BatchNorm1d(SIZE),
}


MODULES: list[PolicyLike] = [
    policies.save_modules("linear"),
    policies.save_modules("activation"),
    policies.save_modules("linear", "activation"),
    policies.save_modules("*"),
    policies.first_match(policies.save_modules("activation"), policies.save_matmuls),
    policies.save_all,
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_written", [False, True])
def test_kept_modules_whose_results_or_inputs_are_written(activation: str, is_written: bool) -> None:
    # silu and rrelu save their input, which they then overwrite, so plain autograd saves a copy or refuses
    net = Writes(activation=ACTIVATIONS[activation](), is_written=is_written)
    try:
        backward(net(square()).sum())
    except RuntimeError:
        pytest.skip("plain autograd refuses it")

    def check(variant: tuple[PolicyLike, bool]) -> None:
        policy, twice = variant
        fresh = Writes(activation=ACTIVATIONS[activation](), is_written=is_written)
        assert_like_plain(fresh, policy, squares(1), twice=twice)

    try_all(check, itertools.product(MODULES, [False, True]))


def test_a_kept_module_that_writes_into_the_regions_argument_is_right_or_refused() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(SIZE, SIZE), nn.Tanh())
    region = recollect.checkpoint(net, policy=policies.save_modules("0", "1"))
    for _ in range(STEPS):
        x = square()
        expected = torch.autograd.grad(net(x * 1).sum(), [x])
        try:
            assert all(map(torch.equal, torch.autograd.grad(region(x * 1).sum(), [x]), expected))
        except recollect.CheckpointError as error:
            assert "in place" in str(error)  # noqa: PT017


def test_a_kept_block_that_writes_into_a_tensor_it_closes_over_is_right_or_refused() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(SIZE, SIZE)

        @recollect.region("product")
        def collect(h: Tensor) -> Tensor:
            total.add_(h.detach())
            return h @ w

        y = collect(x).sin()
        return (collect(y) * total).tanh().exp()

    assert_like_plain(fn, policies.save_names("product"), squares(2))
