"""Steps under a policy, whatever it keeps, give what the plain steps give, to the bit.

All do three steps: the first call learns what the policy says, and those after it run lighter.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, Site, policies
from recollect._core.reachable import find_held
from recollect._policy.base import PolicyLike
from tests.contracts.stepping import (
    Derive,
    Outcome,
    by_backward,
    by_backward_to_some,
    by_backward_twice,
    by_double_backward,
    by_grad,
    is_same,
    to_loss,
)
from tests.corpus import CASES, Call, Case
from tests.deciding import toss
from tests.trying import try_all

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

STEPS = 3
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# What is kept


def by_coin(site: Site) -> Decision:
    return toss(site, seed=0)


def by_other_coin(site: Site) -> Decision:
    return toss(site, seed=1)


def by_call(site: Site) -> Decision:
    return Decision.SAVE if site.call == 0 else Decision.RECOMPUTE


POLICIES: dict[str, PolicyLike] = {
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "matmuls": policies.save_matmuls,
    "attention": policies.save_attention,
    "random": policies.save_random,
    "strictly random": policies.strictly(policies.save_random),
    "every second": policies.save_every(
        ("aten.mm.default", "aten.addmm.default", "aten.mul.Tensor", "aten.exp.default", "aten.sin.default"), 2
    ),
    "larger": policies.save_larger_than(16),
    "coin": by_coin,
    "other coin": by_other_coin,
    "first calls": by_call,
    "mixture": policies.first_match(
        policies.save_random,
        policies.save_every("aten.addmm.default", 2),
        policies.save_ops(
            "aten.exp.default", "aten.tanh.default", "aten.topk.default", "aten.native_layer_norm.default"
        ),
        policies.save_if(policies.flops_per_byte > 4),
    ),
}


def submodules(fn: Callable[..., Any]) -> list[str]:
    """Paths of the modules that a policy can keep in a region of this function."""
    roots = find_held(fn).modules
    return sorted({path for root in roots for path, _ in root.named_modules() if path})


def every_second_module(call: Call) -> PolicyLike:
    return policies.save_modules(*submodules(call.fn)[::2])


def modules_and_coin(call: Call) -> PolicyLike:
    return policies.first_match(policies.save_modules(submodules(call.fn)[-1]), by_coin)


BY_MODULE: dict[str, Callable[[Call], PolicyLike]] = {
    "all modules": lambda _: policies.save_modules("**"),
    "every second module": every_second_module,
    "last module and coin": modules_and_coin,
}

HAVE_SUBMODULES = [case for case in CASES if submodules(case.build().fn)]


def policy_for(name: str, call: Call) -> PolicyLike:
    return POLICIES[name] if name in POLICIES else BY_MODULE[name](call)


# Three steps


def next_call(first: Call, case: Case) -> Call:
    """The same function with other arguments and, as after an optimizer's step, other parameters."""
    other = case.build()
    with torch.no_grad():
        for parameter in first.parameters():
            if isinstance(parameter, nn.Parameter):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return Call(fn=first.fn, args=other.args, kwargs=other.kwargs, watch=(*first.watch, *other.watch))


def run_steps(case: Case, engine: Callable[[Call], Wrap], derive: Derive) -> list[Outcome]:
    torch.manual_seed(0)
    first = case.build()
    fn = engine(first)(first.fn)
    outcomes = []
    for step in range(STEPS):
        torch.manual_seed(2 * step)
        call = first if step == 0 else next_call(first, case)
        for tensor in call.parameters():
            tensor.grad = None
        torch.manual_seed(2 * step + 1)
        with case.around():
            outputs = fn(*call.args, **call.kwargs)
        loss = to_loss(outputs)
        torch.rand(1)  # backward does not start where forward ended
        outcome = Outcome(call, outputs, derive(loss, call.parameters()))
        outcome.buffers = [buffer.clone() for buffer in outcome.buffers]
        outcomes.append(outcome)
    return outcomes


def has_same_bits(one: Any, other: Any) -> bool:
    """As `is_same`, but what is not a number equals itself: three steps overflow where one does not."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_floating_point():
        return is_same(one.isnan(), other.isnan()) and is_same(one.nan_to_num(), other.nan_to_num())
    return is_same(one, other)


def assert_same_steps(case: Case, engine: Callable[[Call], Wrap], derive: Derive, *, is_nested: bool = False) -> None:
    pairs = zip(plain_steps(case, derive, is_nested), run_steps(case, engine, derive), strict=True)
    for step, (plain, ours) in enumerate(pairs):
        for what in ("outputs", "gradients", "buffers", "random_states"):
            expected, got = getattr(plain, what), getattr(ours, what)
            assert len(expected) == len(got)
            differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not has_same_bits(a, b)]
            assert differing == [], f"step {step}: {what} {differing} differ"


# Regions, and regions within regions


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def selective(name: str) -> Callable[[Call], Wrap]:
    return lambda call: functools.partial(recollect.checkpoint, policy=policy_for(name, call))


def nest(outer: Wrap, inner: Wrap) -> Wrap:
    """One region inside another, which draws numbers of its own before and after."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            noise = torch.rand(2, device="cpu")
            return noise.exp(), inner(fn)(*args, **kwargs), torch.rand(2, device="cpu")

        return outer(around)

    return wrap


NESTINGS: dict[str, Callable[[str], Callable[[Call], Wrap]]] = {
    "selective in plain": lambda name: lambda call: nest(recollect.checkpoint, selective(name)(call)),
    "plain in selective": lambda name: lambda call: nest(selective(name)(call), recollect.checkpoint),
    "selective in selective": lambda name: lambda call: nest(selective("other coin")(call), selective(name)(call)),
}


@functools.cache
def plain_steps(case: Case, derive: Derive, is_nested: bool) -> list[Outcome]:
    with mock.patch.object(recollect, "checkpoint", lambda fn, **_: fn):
        return run_steps(case, lambda _: nest(unwrapped, unwrapped) if is_nested else unwrapped, derive)


# The tests

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@each_case
def test_backward_under_a_policy_gives_what_plain_steps_give(case: Case) -> None:
    try_all(lambda name: assert_same_steps(case, selective(name), by_backward), POLICIES)


@pytest.mark.parametrize("case", HAVE_SUBMODULES, ids=str)
def test_backward_with_kept_modules_gives_what_plain_steps_give(case: Case) -> None:
    try_all(lambda name: assert_same_steps(case, selective(name), by_backward), BY_MODULE)


@each_case
@pytest.mark.parametrize("derive", [by_backward_twice, by_grad, by_backward_to_some])
def test_other_passes_under_a_policy_give_what_plain_steps_give(case: Case, derive: Derive) -> None:
    try_all(lambda name: assert_same_steps(case, selective(name), derive), ["coin", "larger"])


@pytest.mark.parametrize("case", [case for case in CASES if case.has_double_backward], ids=str)
def test_double_backward_under_a_policy_gives_what_plain_steps_give(case: Case) -> None:
    try_all(lambda name: assert_same_steps(case, selective(name), by_double_backward), ["coin", "larger"])


@each_case
@pytest.mark.parametrize("nesting", NESTINGS)
def test_nested_regions_under_policies_give_what_plain_steps_give(nesting: str, case: Case) -> None:
    try_all(
        lambda name: assert_same_steps(case, NESTINGS[nesting](name), by_backward, is_nested=True),
        ["coin", "mixture", "random"],
    )


@each_case
def test_a_region_directly_in_a_region_under_the_same_policy_gives_what_plain_steps_give(case: Case) -> None:
    def check(name: str) -> None:
        def twice(call: Call) -> Wrap:
            return lambda fn: selective(name)(call)(selective(name)(call)(fn))

        assert_same_steps(case, twice, by_backward_twice)

    try_all(check, ["coin", "larger"])
