"""Regions under policies inside other regions: what the inner one keeps, the outer one remakes in the same places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect import Decision, policies
from recollect._policy.base import PolicyLike
from tests.selective.comparing import assert_like_plain, squares

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

OUTER: dict[str, PolicyLike | None] = {"plain": None, "nothing": policies.save_nothing, "all": policies.save_all}
each_outer = pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)


def around(fn: Callable[..., Any], outer: PolicyLike | None) -> Callable[..., Any]:
    return recollect.checkpoint(fn) if outer is None else recollect.checkpoint(fn, policy=outer)


@each_outer
@pytest.mark.parametrize("twice", [False, True])
def test_a_value_that_is_named_after_another_one_was_kept(outer: PolicyLike | None, twice: bool) -> None:
    """At the inner region's first call it is kept when it is named, later when it is made: the order must not tell."""

    def inner(x: Tensor) -> Tensor:
        first, second = x.sin(), x.cos()
        recollect.name(first, "first")
        return (first * second).exp() * first

    keep = policies.first_match(policies.save_names("first"), policies.save_ops("aten.cos.default"))
    region = recollect.checkpoint(inner, policy=keep)
    assert_like_plain(lambda x: around(lambda y: region(y * 2).tanh(), outer)(x), policies.save_nothing, squares(1))
    assert_like_plain(lambda y: region(y * 2).tanh(), outer or policies.save_nothing, squares(1), twice=twice)


@each_outer
@pytest.mark.parametrize("check", ["metadata", "values", "none"])
def test_functions_that_share_a_name_and_what_is_learned(outer: PolicyLike | None, check: Any) -> None:
    """One piece of code, three functions: what one of them teaches the engine must not shift what another kept."""

    def make(steps: int) -> Callable[..., Any]:
        def body(x: Tensor, w: Tensor) -> Tensor:
            for step in range(steps):
                x = recollect.name((x @ w).sin(), "late") if step else x @ w
            return x

        return recollect.checkpoint(
            body, policy=policies.first_match(policies.save_names("late"), toss), name="body", check=check
        )

    def toss(site: recollect.Site) -> Decision:
        return Decision.SAVE if (len(site.op) + site.call) % 2 else Decision.RECOMPUTE

    def fn(x: Tensor, w: Tensor) -> Tensor:
        for steps in (1, 3, 2):
            x = make(steps)(x, w).tanh()
        return x

    assert_like_plain(around(fn, outer), policies.save_nothing, squares(2), twice=True)


@each_outer
def test_a_policy_that_answers_otherwise_later(outer: PolicyLike | None) -> None:
    """The outer region's recomputation follows what the inner one kept, not what the policy would say now."""
    asked = 0

    def moody(_site: recollect.Site) -> Decision:
        nonlocal asked
        asked += 1
        return Decision.SAVE if asked % 3 else Decision.RECOMPUTE

    def fixed(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().exp().tanh()

    assert_like_plain(
        lambda x, w: around(lambda a, b: recollect.checkpoint(fixed, policy=moody)(a, b).cos(), outer)(x, w),
        policies.save_nothing,
        squares(2),
    )


def test_a_list_may_be_shorter_than_at_the_first_call() -> None:
    def fn(box: list[Tensor]) -> Tensor:
        return torch.stack([(x @ x).sin().exp() for x in box]).sum(0)

    region = recollect.checkpoint(fn, policy=policies.save_matmuls)
    for count in (3, 3, 2, 2, 3, 1, 1):
        box = [torch.randn(4, 4, requires_grad=True) for _ in range(count)]
        expected = torch.autograd.grad(fn(box).sum(), box)
        found = torch.autograd.grad(region(box).sum(), box)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_kept_blocks_that_one_step_did_not_need() -> None:
    last = recollect.region("last")(lambda x: x * 2)
    region = recollect.checkpoint(lambda x: last(x.sin()), policy=policies.save_names("last"))
    outer = recollect.checkpoint(lambda x: region(region(x.exp()).cos()))
    x = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(((x.exp().sin() * 2).cos().sin() * 2).sum(), x)
    for _ in range(4):
        region(x).sum().backward()
        x.grad = None
        outer(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
        x.grad = None
