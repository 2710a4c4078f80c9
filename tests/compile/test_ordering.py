"""Inductor runs what a plan recomputes where the plan has it, so that the peak is the plan's."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._inductor.utils import fresh_cache

from recollect import Choice, Decision, Plan
from recollect._compile.ordering import keep_order
from recollect._compile.partition import Partition, partitioner

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Chain(fx.Graph):
    """Three products that do not need each other, and something pointwise."""

    def __init__(self) -> None:
        super().__init__()
        x = self.placeholder("x")
        products = [self.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(3)]
        wave = self.call_function(torch.ops.aten.sin.default, (products[0],))
        last = self.call_function(torch.ops.aten.mm.default, (products[2], wave))
        self.output((*products, last))


def test_each_product_waits_for_the_one_before_and_results_stay() -> None:
    graph = fx.GraphModule(nn.Module(), Chain())
    x = torch.randn(3, 3)
    expected: tuple[Tensor, ...] = graph(x)
    assert keep_order(graph) == 2  # the last one reads what the one before it gives
    nodes = graph.graph.find_nodes(op="call_function", target=control_deps)
    assert [[one.name for one in node.args[0]] for node in nodes] == [["mm_default"], ["mm_default_1"]]
    for found, wanted in zip(graph(x), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_product_that_reads_what_comes_of_the_one_before_need_not_wait() -> None:
    """Who waits for a value is a reader of it, so that nothing may be written into its memory."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.mm.default, (x, x))
    wave = graph.call_function(torch.ops.aten.sin.default, (first,))
    turned = graph.call_function(torch.ops.aten.t.default, (wave,))
    graph.output(graph.call_function(torch.ops.aten.mm.default, (turned, x)))
    assert keep_order(fx.GraphModule(nn.Module(), graph)) == 0


def test_of_several_results_the_one_that_lives_longest_is_waited_for() -> None:
    """Not every version of torch waits for a tuple, such as the gradients of a convolution."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    options = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    gradients = graph.call_function(torch.ops.aten.convolution_backward.default, (x, x, weight, *options))
    of_image = graph.call_function(operator.getitem, (gradients, 0))
    of_weight = graph.call_function(operator.getitem, (gradients, 1))
    wave = graph.call_function(torch.ops.aten.sin.default, (of_image,))
    product = graph.call_function(torch.ops.aten.mm.default, (weight, weight))
    graph.output((of_weight, wave, product))
    module = fx.GraphModule(nn.Module(), graph)
    assert keep_order(module) == 1
    (node,) = module.graph.find_nodes(op="call_function", target=control_deps)
    assert node.args[0] == (of_weight,)


def test_a_graph_with_one_product_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (x, x)))
    module = fx.GraphModule(nn.Module(), graph)
    assert keep_order(module) == 0
    assert not module.graph.find_nodes(op="call_function", target=control_deps)


@pytest.mark.long
@pytest.mark.kernels
def test_under_inductor_a_step_stays_within_its_budget() -> None:
    pytest.importorskip("scipy")
    from tests.compile.graphs import transformer

    torch.manual_seed(0)
    model, x = transformer(layers=3, width=64), torch.randn(4, 64, 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def peak_of(budget: int | str) -> tuple[int, Partition]:
        torch._dynamo.reset()
        found: list[Partition] = []
        options: dict[str, Any] = {"custom_partitioner_fn": partitioner(budget=budget, report=found.append)}
        compiled = torch.compile(model, fullgraph=True, options=options)

        def step() -> None:
            model.zero_grad(set_to_none=False)
            compiled(x).square().mean().backward()

        for _ in range(2):
            step()
        return measure_peak(step), found[0]

    with fresh_cache(), inductor_config.patch(compile_threads=1):
        plain, whole = peak_of("fastest")
        held, most = whole.simulation.held_bytes, whole.simulation.peak_bytes
        budget = held + int(0.65 * (most - held))
        measured, found = peak_of(budget)
    predicted = found.simulation.peak_bytes - held
    assert measured <= budget - held
    assert 0.95 * predicted <= measured <= predicted
    assert plain == pytest.approx(most - held, rel=0.05)


class Head(nn.Module):
    """Its logits are by far the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 2048, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.up(x).relu())), targets)


@pytest.mark.kernels
def test_under_inductor_gradients_take_the_place_of_logits_that_are_made_again() -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    model, x, targets = Head(), torch.randn(256, 32), torch.randint(0, 2048, (256,))
    found: list[Partition] = []
    plan = Plan(choices=(Choice(op="aten.mm.default", decision=Decision.RECOMPUTE),))
    options: dict[str, Any] = {"custom_partitioner_fn": partitioner(plan, report=found.append)}
    with fresh_cache(), inductor_config.patch(compile_threads=1):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, options=options)

        def step() -> None:
            compiled(x, targets).backward()
            model.zero_grad()

        for _ in range(2):
            step()
        measured = measure_peak(step)
    logits = 256 * 2048 * 4
    assert any("mm" in found[0].profile.calls[number].op for number in found[0].simulation.recomputed_calls)
    assert logits < measured < 1.5 * logits


def measure_peak(step: object) -> int:
    """Inductor's code allocates past the dispatcher: only torch's profiler sees it."""
    assert callable(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
