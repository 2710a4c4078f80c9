"""Objects among the arguments, and collections in context variables, that the function changes: once, and put back."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from tests.counting import count_calls


class Cache:
    """Collects what it is given, as caches of keys and values do."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self.by_name: dict[str, Any] = {"count": 0}

    def update(self, item: Tensor) -> Tensor:
        self.items.append(item)
        self.by_name["count"] += 1
        count: int = self.by_name["count"]
        return torch.stack(self.items).sum(0) * count


def grow(x: Tensor, cache: Cache) -> Tensor:
    return cache.update(x.sin()).exp()


def grown(call: Any, x: Tensor) -> tuple[Tensor, Cache]:
    cache, y = Cache(), x
    for _ in range(3):
        y = call(y, cache)
    return torch.autograd.grad(y.sum(), x)[0], cache


@pytest.mark.parametrize("policy", [None, recollect.policies.save_ops("aten.exp.default")])
def test_recomputation_sees_an_object_as_forward_saw_it(policy: Any) -> None:
    x = torch.randn(4, requires_grad=True)
    expected, plain = grown(grow, x)
    got, cache = grown(recollect.checkpoint(grow, policy=policy), x)
    assert torch.equal(expected, got)
    assert len(cache.items) == len(plain.items) == 3
    assert cache.by_name == plain.by_name


def test_an_object_is_left_as_forward_left_it_after_a_recomputation_that_fails() -> None:
    cache, x = Cache(), torch.randn(4, requires_grad=True)

    def fn(x: Tensor, cache: Cache) -> Tensor:
        y = grow(x, cache)
        if recollect.is_recomputing():
            raise KeyError
        return y.sin()

    y = recollect.checkpoint(fn)(x, cache)
    items = list(cache.items)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert all(a is b for a, b in zip(cache.items, items, strict=True))
    assert cache.by_name == {"count": 1}


def test_a_tensor_of_an_object_that_is_written_into_is_named() -> None:
    class Static:
        def __init__(self) -> None:
            self.keys = {"layer 0": torch.zeros(4)}

    def fn(x: Tensor, cache: Static) -> Tensor:
        cache.keys["layer 0"].add_(x.detach())
        return (x * cache.keys["layer 0"]).sin()

    x = torch.randn(4, requires_grad=True)
    y = recollect.checkpoint(fn, name="attention")(x, Static())
    with pytest.raises(recollect.ChangedInputError) as caught:
        y.sum().backward()
    assert str(caught.value).startswith(
        "region 'attention': the function wrote into Static.keys['layer 0'], a tensor inside one of its arguments"
    )


def test_an_object_that_forward_does_not_change_is_not_held() -> None:
    x, cache = torch.randn(4, requires_grad=True), Cache()
    alive = weakref.ref(cache)
    y = recollect.checkpoint(lambda x, cache: x.exp() * len(cache.items))(x, cache)
    y.sum().backward()
    del cache
    assert alive() is None


collected: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("collected", default=None)


def record(x: Tensor) -> Tensor:
    y = x.sin()
    found = collected.get()
    if found is not None:
        found["router"].append(y)
    return y.exp()


def test_what_is_collected_in_a_context_variable_is_collected_once_and_keeps_nothing_alive() -> None:
    x = torch.randn(4, requires_grad=True)
    found: dict[str, list[Tensor]] = defaultdict(list)
    token = collected.set(found)
    y = recollect.checkpoint(record)(recollect.checkpoint(record)(x))
    collected.reset(token)
    assert len(found["router"]) == 2
    (y.sum() + found["router"][0].sum()).backward()
    assert len(found["router"]) == 2
    expected = torch.autograd.grad(x.sin().exp().sin().exp().sum() + x.sin().sum(), x)[0]
    assert torch.equal(x.grad, expected) or torch.allclose(x.grad, expected)  # type: ignore[arg-type]


def test_a_graph_that_is_dropped_is_not_held_by_what_was_collected() -> None:
    gc.disable()
    try:
        x = torch.randn(4, requires_grad=True)
        found: dict[str, list[Tensor]] = defaultdict(list)
        token = collected.set(found)
        y = recollect.checkpoint(record)(recollect.checkpoint(record)(x))
        collected.reset(token)
        alive = weakref.ref(found["router"][0].untyped_storage())
        found.clear()
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_a_context_variable_that_holds_settings_is_seen_as_in_forward() -> None:
    settings: ContextVar[dict[str, float]] = ContextVar("settings")
    token = settings.set({"scale": 3.0})
    x = torch.ones(2, requires_grad=True)
    y = recollect.checkpoint(lambda x: (x * settings.get()["scale"]).exp())(x)
    settings.reset(token)
    y.sum().backward()
    assert torch.equal(x.grad, 3 * torch.full((2,), 3.0).exp())  # type: ignore[arg-type]


def test_plain_values_in_a_context_variable_cost_no_call_each() -> None:
    # Since torch 2.13 its settings are such values, once Inductor ran: hundreds, at each call of a region.
    settings: ContextVar[dict[str, Any]] = ContextVar("settings")
    x = torch.ones(2, requires_grad=True)

    def step() -> None:
        torch.autograd.backward(recollect.checkpoint(torch.sin)(x).sum())

    def count(size: int) -> int:
        def run() -> int:
            settings.set({str(number): number for number in range(size)} | {"parts": list(range(size))})
            step()
            return count_calls(step)

        return copy_context().run(run)

    assert count(1000) == count(1)
