"""Gradients of offloaded steps are those of plain ones, to the bit, for every function of the corpus and every tier."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._offload.offload import make_offload
from tests.contracts.stepping import (
    Derive,
    by_backward,
    by_backward_to_some,
    by_backward_twice,
    by_double_backward,
    by_grad,
    is_same,
    plain_step,
    run_step,
)
from tests.corpus import CASES, Case
from tests.offload.late_lanes import late_session
from tests.offload.shelf import Shelf
from tests.trying import try_all


def disk(folder: Path) -> AbstractContextManager[Any]:
    return recollect.offload(tier="disk", directory=folder, min_bytes=0)


TIERS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "disk": disk,
    "host copies": lambda _: make_offload(min_bytes=0, copies_host=True),
    "own": lambda _: recollect.offload(tier=Shelf(), min_bytes=0),
    "late": lambda _: late_session()[0],
    "late and own": lambda _: late_session(slow=Shelf())[0],
    "little in flight": lambda _: late_session(in_flight=1)[0],
    "hidden": lambda _: late_session(waits=False)[0],
}


def wrapped(away: AbstractContextManager[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with away:
                return fn(*args, **kwargs)

        return run

    return wrap


def assert_same(case: Case, away: AbstractContextManager[Any], derive: Derive) -> None:
    plain, ours = plain_step(case, derive), run_step(case, wrapped(away), derive)
    for what in ("outputs", "gradients", "buffers", "random_states"):
        pairs = zip(getattr(plain, what), getattr(ours, what), strict=True)
        assert [index for index, (one, other) in enumerate(pairs) if not is_same(one, other)] == [], what


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:offloading to")  # so small a step is no faster for it
def test_gradients_are_those_of_the_plain_step(case: Case, tmp_path: Path) -> None:
    derives = [by_backward] * 5 + [by_backward_twice, by_grad, by_backward_to_some]
    derives += [by_double_backward] * case.has_double_backward

    def check(tier: str) -> None:
        away = TIERS[tier](tmp_path)
        for derive in derives:
            assert_same(case, away, derive)

    try_all(check, TIERS)


def grads_of(net: nn.Module, x: Tensor, away: AbstractContextManager[Any]) -> list[Tensor]:
    net.zero_grad()
    with away:
        loss = net(x).square().mean()
    loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.filterwarnings("ignore:offloading to")
def test_regions_inside_give_their_inputs_to_the_tier(tier: str, tmp_path: Path) -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    net = nn.Sequential(*layers)
    x = torch.randn(64, 32)
    plain = [grad.clone() for grad in grads_of(net, x, torch.enable_grad())]
    away = TIERS[tier](tmp_path)
    with recollect.apply(net, {"*": recollect.Decision.RECOMPUTE}):
        for _ in range(4):
            ours = grads_of(net, x, away)
            assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("tier", ["disk", "late"])
def test_a_context_inside_a_region_changes_nothing(tier: str, tmp_path: Path) -> None:
    away = TIERS[tier](tmp_path)

    def block(x: Tensor) -> Tensor:
        with away:
            return (x.sin().exp() * x).tanh()

    x = torch.randn(64, requires_grad=True)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    (ours,) = torch.autograd.grad(recollect.checkpoint(block)(x).sum(), x)
    assert torch.equal(ours, plain)
