"""A later call that looks like the learned one but is not: a plan is followed only where it is exact."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import policies

Fn = Callable[..., Tensor]


def assert_same_steps(fn: Fn, calls: list[tuple[Tensor, ...]]) -> str:
    """Gradients of each call are those of plain autograd; gives how the last one is recomputed."""
    region = recollect.checkpoint(fn, policy=policies.save_matmuls)
    for tensors in calls:
        expected = torch.autograd.grad(fn(*tensors).abs().sum(), tensors)
        found = torch.autograd.grad(region(*tensors).abs().sum(), tensors)
        assert all(map(torch.equal, found, expected))
    return str(recollect.explain(region)).splitlines()[-1]


def square(*, is_transposed: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(4, 4, dtype=dtype)
    return (made.t() if is_transposed else made).requires_grad_()


def test_a_copy_that_was_no_copy_when_it_was_learned() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin().contiguous()
        return (y.view(-1).exp().view(4, 4) @ w).tanh()

    assert_same_steps(fn, [(square(is_transposed=i % 2 == 1), square()) for i in range(4)])


def test_a_cast_of_a_parameter_that_is_none() -> None:
    # As in the norms of Gemma: the first that is seen of the parameter is that it is its own cast.
    weight = torch.randn(4, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin() * (1.0 + weight.float()) @ w).tanh()

    way = assert_same_steps(fn, [(square(), square()) for _ in range(4)])
    assert way.startswith("recomputed by replaying")


def test_a_write_that_was_not_there_when_it_was_learned() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        if x[0, 0] > 0:
            y[0] = 0.5
        return (y @ w).exp()

    def make(sign: int) -> Tensor:
        return (torch.rand(4, 4) * sign).requires_grad_()

    assert_same_steps(fn, [(make(sign), square()) for sign in (-1, 1, -1, -1, 1)])


def test_a_list_that_its_owner_changes_afterwards() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y, dims = x.cos(), [0]
        a = y.sum(dims).exp()
        dims[0] = 1
        return a.sin() + y.sum(dims) @ w

    way = assert_same_steps(fn, [(square(), square()) for _ in range(3)])
    assert way.startswith("recomputed by replaying")


def test_conjugates() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin().conj() @ w).sin()

    def make(*, is_real: bool) -> Tensor:
        made = square(dtype=torch.complex64).detach()
        return torch.complex(made.real, made.imag * (not is_real)).requires_grad_()

    assert_same_steps(fn, [(make(is_real=i == 0), make(is_real=False)) for i in range(3)])


def test_a_chain_of_any_length() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        for _ in range(600):
            y = (y * 1.001).sin()
        return y

    way = assert_same_steps(fn, [(square(), square()) for _ in range(3)])
    assert way.startswith("recomputed by replaying")


def test_a_cache_that_is_filled_at_the_first_call() -> None:
    class Rotary(nn.Module):
        cache: Tensor | None = None

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = (torch.ones(4, 4) @ torch.ones(4, 4)).cos()
            return ((x @ w) * self.cache).sin().mul_(2)

    module = Rotary()
    region = recollect.checkpoint(module, policy=policies.save_matmuls)
    for _ in range(3):
        tensors = square(), square()
        found = torch.autograd.grad(region(*tensors).sum(), tensors)
        expected = torch.autograd.grad(module(*tensors).sum(), tensors)
        assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:policy .* this step")
def test_a_value_that_is_given_a_name_later_is_kept_from_then_on() -> None:
    is_named = [False]

    def fn(x: Tensor, w: Tensor) -> Tensor:
        q = recollect.name(x @ w, "q")
        k = q.sin() @ w
        if is_named[0]:
            recollect.name(k, "k")
        return k.exp().sin()

    region = recollect.checkpoint(fn, policy=policies.save_names("q", "k"))
    for step in range(6):
        is_named[0] = step >= 2
        tensors = square(), square()
        found = torch.autograd.grad(region(*tensors).sum(), tensors)
        assert all(map(torch.equal, found, torch.autograd.grad(fn(*tensors).sum(), tensors)))
    (explained,) = recollect.explain(region).regions
    assert [site.what for site in explained.calls[0].kept] == ["aten.mm.default"] * 2


def test_a_kept_value_that_is_changed_after_the_region_is_refused_by_name() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, (y + 1).exp().sin()

    region = recollect.checkpoint(fn, policy=policies.save_matmuls)
    for _ in range(2):
        y, z = region(square(), square())
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(recollect.ChangedInputError) as raised:
            z.sum().backward()
        assert str(raised.value).startswith("region 'fn': the result of matmul, test_plans.py:")
        assert ", which is kept (float32[4, 4]), was changed in place after forward used it" in str(raised.value)
