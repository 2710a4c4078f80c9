"""Regions under a policy in which Dynamo breaks its graph: their parts are compiled, and keep what the policy says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint as theirs  # torch's own, to compare with

import recollect
from recollect import Decision, compat, policies
from tests.compile.counting import Graphs, Step, assert_same, count_ops, parameters_of, run_step

# Dynamo looks at the .grad of every tensor that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class Cut(nn.Module):
    """Dynamo cuts it in two, and `between` runs as it is written."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).sigmoid())
        if self.between is not None:
            x = torch._dynamo.disable(self.between)(x)
        else:
            torch._dynamo.graph_break()
        return self.third(x.sin()).exp()  # type: ignore[no-any-return]


def net_of(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(make(), nn.Linear(4, 4), make())


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "products": lambda net: recollect.apply(net, {"[02]": policies.save_matmuls}),
    "function": lambda net: recollect.apply(
        net, {"[02]": lambda site: Decision.SAVE if "mm" in site.op else Decision.RECOMPUTE}
    ),
    "torch's": lambda net: wrap(net, compat.checkpoint, compat.create_selective_checkpoint_contexts),
}


def wrap(net: nn.Module, checkpoint: Any, make_contexts: Any) -> None:
    for index in (0, 2):
        block: Any = net[index]  # type: ignore[index]
        contexts = functools.partial(make_contexts, PRODUCTS)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


class Runs:
    """A backend that counts how often each kind of graph runs."""

    def __init__(self) -> None:
        self.graphs, self.runs = Graphs(), 0

    def __call__(self, graph: Any, examples: Any) -> Any:
        compiled = self.graphs.backend(graph, examples)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


def take_steps(net: nn.Module, plain: nn.Module, x: Tensor, count: int = 3) -> tuple[Runs, Step]:
    """Compiled steps, each of which gives what the plain model gives."""
    backend = Runs()
    call = torch.compile(net, backend=backend)
    for seed in range(count):
        step = run_step(call, [x], of=parameters_of(net), seed=seed)
        assert_same(step, run_step(plain, [x], of=parameters_of(plain), seed=seed))
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    return backend, step


def test_torchs_own_compiles_no_part() -> None:
    net, backend = net_of(Cut), Runs()
    wrap(net, theirs.checkpoint, theirs.create_selective_checkpoint_contexts)
    run_step(torch.compile(net, backend=backend), [torch.randn(2, 4)], of=parameters_of(net))
    assert not count_ops(backend.graphs.forward, "sigmoid")["sigmoid"]


@pytest.mark.parametrize("rules", RULES)
def test_parts_are_compiled_and_keep_what_the_policy_says(rules: str) -> None:
    net = net_of(Cut)
    RULES[rules](net)
    backend, _ = take_steps(net, net_of(Cut), torch.randn(2, 4, requires_grad=True))
    blocks = 2 if rules == "function" else 1  # it may go by the names of regions; else equal blocks share code
    assert count_ops(backend.graphs.forward, "sigmoid", "exp") == {"sigmoid": blocks, "exp": blocks}
    assert backend.graphs.count("sigmoid", "addmm") == {"sigmoid": blocks, "addmm": 0}, "products are not made again"


def test_what_stands_between_parts_runs_again_and_they_do_not() -> None:
    calls: list[Tensor] = []

    def between(x: Tensor) -> Tensor:
        calls.append(x.detach())
        return x.exp().sin()

    net = net_of(lambda: Cut(between))
    recollect.apply(net, {"[02]": policies.save_matmuls})
    backend, _ = take_steps(net, net_of(lambda: Cut(lambda x: x.exp().sin())), torch.randn(2, 4))
    assert backend.runs == 3 * 2 * 2
    assert len(calls) == 3 * 2 * 2
    assert torch.equal(calls[0], calls[3])


def test_named_values_are_kept_in_their_part() -> None:
    class Named(Cut):
        def forward(self, x: Tensor) -> Tensor:
            hidden = recollect.name(self.first(x).sigmoid(), "hidden")
            torch._dynamo.graph_break()
            return self.third(self.second(hidden).sin()).exp()  # type: ignore[no-any-return]

    net = net_of(Named)
    recollect.apply(net, {"[02]": policies.save_names("hidden")})
    backend, _ = take_steps(net, net_of(Named), torch.randn(2, 4))
    assert backend.graphs.count("sigmoid", "sin") == {"sigmoid": 0, "sin": 1}


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


class Random(Cut):
    def forward(self, x: Tensor) -> Tensor:
        x = drop(self.second(self.first(x).sigmoid()))
        x = torch._dynamo.disable(drop)(x)
        return drop(self.third(x).exp())


class Normed(Cut):
    """Its first part writes into buffers, of which one is read between the parts."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(lambda x: x * self.seen)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(self.norm(x))


class Writing(Cut):
    """Its second part writes into what the first has made, and what stands between has saved."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).sigmoid())
        y = torch._dynamo.disable(torch.Tensor.clone)(x).exp()
        x.mul_(0.5)
        return self.third(x.sin() + y).exp()  # type: ignore[no-any-return]


class Looping(Cut):
    """One part is called again and again."""

    def part(self, x: Tensor, times: float) -> Tensor:
        return self.second(self.first(x).sigmoid()) * times  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for chosen in range(3):
            index = (x.sum(-1) > 0).nonzero()[:, 0] if chosen % 2 else torch.arange(len(x))
            if len(index.tolist()) > 0:
                x = x.index_add(0, index, self.part(x[index], 0.5))
        return self.third(x)  # type: ignore[no-any-return]


class Structured(Cut):
    """Parts take and give more than a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.first(x), "count": len(x), "all": [x, x.sin()]}
        torch._dynamo.graph_break()
        state["x"] = self.second(state["x"].sigmoid()) * state["count"]
        torch._dynamo.graph_break()
        return self.third(state["x"] + state["all"][1]).exp()  # type: ignore[no-any-return]


@pytest.mark.parametrize("rules", ["save_matmuls", "save_nothing", "selective"])
@pytest.mark.parametrize("block", [Random, Normed, Writing, Looping, Structured])
def test_gradients_and_buffers_are_the_plain_ones(block: type[Cut], rules: str) -> None:
    net = net_of(block)
    recollect.apply(net, {"[02]": getattr(policies, rules, rules)})
    backend, _ = take_steps(net, net_of(block), torch.randn(6, 4, requires_grad=True))
    assert backend.graphs.forward


def test_a_graph_that_is_retained_is_gone_through_twice() -> None:
    net, plain, x = net_of(Cut), net_of(Cut), torch.randn(2, 4, requires_grad=True)
    recollect.apply(net, {"[02]": policies.save_matmuls})
    call = torch.compile(net, backend=Runs())
    expected = torch.autograd.grad(plain(x).sum(), x)
    loss = call(x).sum()
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=True), expected)


def test_lengths_that_change_compile_the_parts_as_often_as_without_a_region() -> None:
    counts = {}
    for has_regions in (False, True):
        torch._dynamo.reset()
        net, plain, backend = net_of(Cut), net_of(Cut), Runs()
        if has_regions:
            recollect.apply(net, {"[02]": policies.save_matmuls})
        call = torch.compile(net, backend=backend)
        for length in (2, 3, 5, 7, 2):
            x = torch.randn(length, 4)
            assert_same(run_step(call, [x], of=parameters_of(net)), run_step(plain, [x], of=parameters_of(plain)))
        counts[has_regions] = len(backend.graphs.dynamo)
    assert counts[True] <= counts[False]


def test_a_function_that_dynamo_cannot_compile_keeps_what_the_policy_says() -> None:
    class Uncompiled(Cut):
        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def rest(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x).sigmoid()).sin()).exp()  # type: ignore[no-any-return]

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(x)  # type: ignore[no-any-return]

    net, seen = net_of(Uncompiled), []

    def keep(site: recollect.Site) -> Decision:
        seen.append(site.op)
        return Decision.SAVE if "mm" in site.op else Decision.RECOMPUTE

    recollect.apply(net, {"[02]": keep})
    take_steps(net, net_of(Uncompiled), torch.randn(2, 4))
    assert "aten.addmm.default" in seen


def test_a_backend_that_runs_graphs_as_they_are_keeps_what_the_policy_says() -> None:
    net, plain, x = net_of(Cut), net_of(Cut), torch.randn(2, 4)
    recollect.apply(net, {"[02]": policies.save_matmuls})
    call = torch.compile(net, backend="eager")
    for _ in range(3):
        assert_same(run_step(call, [x], of=parameters_of(net)), run_step(plain, [x], of=parameters_of(plain)))


def test_a_pattern_that_matches_no_module_is_refused() -> None:
    net = net_of(Cut)
    recollect.apply(net, {"[02]": policies.save_modules("thrid")})
    with pytest.raises(ValueError, match="third"):
        torch.compile(net, backend=Runs())(torch.randn(2, 4))


def test_without_its_regions_a_model_is_compiled_without_them() -> None:
    net, backend, x = net_of(Cut), Runs(), torch.randn(2, 4)
    call = torch.compile(net, backend=backend)
    with recollect.apply(net, {"[02]": policies.save_nothing}):
        run_step(call, [x], of=parameters_of(net))
    backend.graphs.backward.clear()
    run_step(call, [x], of=parameters_of(net))
    assert backend.graphs.backward
    assert backend.graphs.count("sigmoid") == {"sigmoid": 0}


def test_blocks_that_are_compiled_one_by_one_share_their_parts() -> None:
    net, plain, backend, x = net_of(Cut), net_of(Cut), Runs(), torch.randn(2, 4, requires_grad=True)
    recollect.apply(net, {"[02]": policies.save_matmuls})
    for index in (0, 2):
        net[index].compile(backend=backend)
    for _ in range(2):
        assert_same(run_step(net, [x], of=parameters_of(net)), run_step(plain, [x], of=parameters_of(plain)))
    assert len(backend.graphs.dynamo) == 2
    assert backend.graphs.count("sigmoid", "addmm") == {"sigmoid": 1, "addmm": 0}


def test_inductor_compiles_the_parts() -> None:
    net, plain, x = net_of(Cut), net_of(Cut), torch.randn(2, 4)
    recollect.apply(net, {"[02]": policies.save_matmuls})
    call = torch.compile(net)
    for _ in range(2):
        step = run_step(call, [x], of=parameters_of(net))
        assert_same(step, run_step(plain, [x], of=parameters_of(plain)), exact=False)
