"""Arguments and results of every kind go through a region of a graph, whoever makes it."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, compat, policies
from recollect.compat import composable


@dataclasses.dataclass
class Data:
    a: Tensor
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Tensor
    b: Any = None


class Named(NamedTuple):
    a: Tensor
    b: Any


class Plain:
    def __init__(self, a: Tensor, b: Any) -> None:
        self.a, self.b = a, b


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered": lambda a, b: collections.OrderedDict(a=a, b=b),
    "dataclass": Data,
    "frozen": Frozen,
    "named": Named,
    "object": Plain,
    "nested": lambda a, b: ({"a": [a, (b, None)]}, 3, "text"),
    "none": lambda a, _: (None, a),
    "constants": lambda a, _: (a, a.shape, a.dtype, slice(0, 2), frozenset({1})),
}


def first(value: Any) -> Tensor | None:
    """The first tensor in it."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Data | Frozen | Plain):
        return value.a
    if isinstance(value, dict):
        value = list(value.values())
    for part in value if isinstance(value, tuple | list) else ():
        found = first(part)
        if found is not None:
            return found
    return None


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, given: Any, *, more: Any) -> Any:
        x, y = first(given), first(more)
        assert x is not None
        assert y is not None
        hidden = self.linear(x).sin() @ self.linear.weight + y
        return KINDS[self.kind](hidden.exp(), hidden * 2)


def apply(block: Block) -> Any:
    recollect.apply(nn.ModuleList([block]), {"0": policies.save_matmuls})
    return block


def compose(block: Block) -> Any:
    composable.checkpoint(block)
    return block


APIS: dict[str, Callable[[Block], Any]] = {
    "apply": apply,
    "checkpoint": lambda block: recollect.checkpoint(block, policy=policies.save_matmuls),
    "compat": lambda block: lambda given, more: compat.checkpoint(block, given, use_reentrant=False, more=more),
    "wrapper": compat.checkpoint_wrapper,
    "composable": compose,
}


def step(call: Any, kind: str, x: Tensor) -> tuple[Tensor, Any]:
    result = call(KINDS[kind](x * 1, x + 1), more=KINDS[kind](x * 2, x))
    loss = first(result)
    assert loss is not None
    return loss.sum(), result


def each_kind() -> Iterator[Any]:
    """Every kind by two of the functions, which take turns; the other pairs are `long`."""
    for number, kind in enumerate(KINDS):
        turn = {number % len(APIS), (number + 2) % len(APIS)}
        for index, api in enumerate(APIS):
            yield pytest.param(kind, api, marks=() if index in turn else pytest.mark.long)


@pytest.mark.parametrize(("kind", "api"), [*each_kind()])
def test_structures_go_in_and_come_out(kind: str, api: str) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(4, 4, requires_grad=True), Block(kind)
    loss, result = step(plain, kind, x)
    expected = torch.autograd.grad(loss, [x, plain.linear.weight])
    block = Block(kind)
    block.load_state_dict(plain.state_dict())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    loss, found = compiled(APIS[api](block), kind, x)
    assert type(found) is type(result)
    for mine, theirs in zip(torch.autograd.grad(loss, [x, block.linear.weight]), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_sequence_passes_structures_on() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            return pair[0].sin().exp(), {"last": pair[0], "none": None}

    x = torch.randn(4, requires_grad=True)

    def f(x: Tensor) -> Any:
        return compat.checkpoint_sequential(
            nn.Sequential(*(Pair() for _ in range(4))), 2, (x, None), use_reentrant=False
        )

    out, rest = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    assert rest["none"] is None
    (found,) = torch.autograd.grad(out.sum() + rest["last"].sum(), x)
    out, rest = f(x)
    torch.testing.assert_close(found, torch.autograd.grad(out.sum() + rest["last"].sum(), x)[0])


def test_arguments_that_a_region_does_not_use_are_not_guarded() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, unused: Any = None) -> Tensor:
            return self.linear(x).sin()  # type: ignore[no-any-return]

    net = nn.Sequential(Takes())
    recollect.apply(net, {"0": Decision.RECOMPUTE})
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x, unused: net[0](x, unused), backend=backend)
    for unused in ("one", "two", (torch.ones(1), 3)):
        compiled(torch.ones(2, 4), unused)
    # Dynamo of torch 2.11 guards all that goes into a higher-order operator, torch's own included.
    # Looking for Transformers' caches guards the types of all arguments, once that library is loaded.
    assert len(graphs) == 1 or torch.__version__.startswith("2.11") or "transformers.cache_utils" in sys.modules
