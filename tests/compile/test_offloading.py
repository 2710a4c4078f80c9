"""OFFLOAD in compiled code: one graph, its values kept and marked, and moved where that frees memory of a device."""

import re
import warnings
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import recollect
from recollect import Decision, compat
from recollect._compile import choosers, offloading, partition, speeds
from recollect._compile.nodes import has_kernel
from recollect._compile.offloading import MARK
from recollect._compile.transfers import ARRIVE, FETCH, RELEASE, SEND, is_transfer
from recollect._core.plans import Choice, Plan
from recollect._plan.sent_values import Carrier
from tests.compile.graphs import run_compiled, run_cut, run_inductor, run_plain, transformer


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)])


def gradients(net: nn.Module, step: Any, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    step(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def compiled(net: nn.Module, graphs: list[fx.GraphModule]) -> Any:
    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(net, backend=backend, fullgraph=True)


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> Carrier:
    """As if values of the CPU could leave, over a link that has time for all of them."""
    carrier = Carrier(bytes_per_s=1e15, seconds_of=speeds.carrier_of(torch.device("cpu")).seconds_of)
    for module in (offloading, choosers):
        monkeypatch.setattr(module, "can_leave", lambda device: True)
    for module in (offloading, choosers, partition):
        monkeypatch.setattr(module, "carrier_of", lambda device: carrier)
    return carrier


def find(graph: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=target))


def offload_by_rule(net: nn.Sequential) -> nn.Module:
    recollect.apply(net, {"*": Decision.OFFLOAD})
    return net


def offload_by_wrapper(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(*map(compat.offload_wrapper, net))


@pytest.mark.parametrize("offload", [offload_by_rule, offload_by_wrapper])
@pytest.mark.parametrize("moves", [False, True])
def test_a_graph_offloads_what_it_keeps(offload: Any, moves: bool, request: pytest.FixtureRequest) -> None:
    if moves:
        request.getfixturevalue("leaves")
    net, x = make_net(), torch.randn(64, 32)
    plain = gradients(net, net, x)
    graphs: list[fx.GraphModule] = []
    ours = gradients(net, compiled(offload(net), graphs), x)
    assert all(map(torch.equal, ours, plain))
    forward, backward = graphs
    assert any(node.meta.get(MARK) for node in forward.graph.nodes)
    counts = [
        len(find(forward, SEND)),
        len(find(forward, RELEASE)),
        len(find(backward, FETCH)),
        len(find(backward, ARRIVE)),
    ]
    assert len(set(counts)) == 1
    assert bool(counts[0]) == moves
    assert not find(backward, torch.ops.aten.addmm.default)  # nothing runs again


def checkpoint_each(net: nn.Sequential, **options: Any) -> Any:
    """The blocks one after the other, each a region."""
    regions = [recollect.checkpoint(block, **options) for block in net]

    def run(x: Tensor) -> Tensor:
        for region in regions:
            x = region(x)
        return x

    return run


def apply_to_each(net: nn.Sequential, **options: Any) -> Any:
    recollect.apply(net, {"*": options})
    return net


@pytest.mark.parametrize("wrap", [checkpoint_each, apply_to_each])
@pytest.mark.parametrize("moves", [False, True])
def test_a_graph_offloads_inputs_of_regions(wrap: Any, moves: bool, request: pytest.FixtureRequest) -> None:
    if moves:
        request.getfixturevalue("leaves")
    net, x = make_net(), torch.randn(64, 32)
    plain = gradients(net, net, x)
    graphs: list[fx.GraphModule] = []
    ours = gradients(net, compiled(wrap(net, offload_inputs=True), graphs), x)
    assert all(map(torch.equal, ours, plain))
    forward, backward = graphs
    made = find(forward, torch.ops.aten.addmm.default)
    assert len(made) == 6
    sources = {node.args[0] for node in find(forward, SEND)}
    # What the first block gives; what the second gives is needed as soon as backward begins.
    assert sources == ({made[1]} if moves else set())
    assert len(find(backward, torch.ops.aten.addmm.default)) == 3  # each block runs again up to its last product


OFFLOADED = frozenset({"aten.addmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"})


def offload_products(site: recollect.Site) -> Decision:
    return Decision.OFFLOAD if site.op in OFFLOADED else Decision.SAVE


@pytest.mark.usefixtures("leaves")
def test_values_leave_when_they_are_made_and_come_back_before_they_are_used() -> None:
    model, x = transformer(4), torch.randn(4, 16, 16)
    done = run_compiled(offload_products, model, x)
    assert all(map(torch.equal, done.gradients, run_plain(model, x)))
    forward, backward = done.forward, done.backward
    assert forward is not None
    assert backward is not None
    sent = find(forward, SEND)
    assert sent
    order = {node: place for place, node in enumerate(forward.graph.nodes)}
    kernels = [order[node] for node in forward.graph.nodes if has_kernel(node)]
    assert not any(order[node.args[0]] < place < order[node] for node in sent for place in kernels)
    for node in find(forward, RELEASE):
        ticket, value = node.args
        assert isinstance(value, fx.Node)
        assert order[node] > order[ticket]
        assert all(user is node or order[user] < order[node] for user in value.users)  # its last reader
    order = {node: place for place, node in enumerate(backward.graph.nodes)}
    for node in find(backward, ARRIVE):
        assert order[node.args[0]] < order[node] < min(order[user] for user in node.users)
    assert len(find(backward, ARRIVE)) == len(sent)


@pytest.mark.usefixtures("leaves")
def test_of_an_operators_results_some_leave_while_others_stay() -> None:
    """A budget sends what attention gives, and keeps its statistics, which are too small to be worth it."""
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    decisions = (Decision.OFFLOAD, Decision.SAVE)
    choices = (Choice(op=attention, output=output, decision=one) for output, one in enumerate(decisions))
    model, x = transformer(layers=3, width=64), torch.randn(4, 32, 64)
    done = run_compiled(Plan(choices=tuple(choices)), model, x)
    assert all(map(torch.equal, done.gradients, run_plain(model, x)))
    found = done.partition
    made = {one.storage: one for one in found.profile.made() if one.storage in found.kept}
    outputs = [made[one].output for one in sorted(found.sent)]
    assert outputs == [0] * len(outputs)
    assert len(outputs) >= 2  # the last one is needed at once
    for storage in found.sent:
        beside = [one for one in made.values() if one.call == made[storage].call]
        assert [one.output for one in beside] == [0, 1]


@pytest.mark.usefixtures("leaves")
def test_a_second_backward_fetches_again() -> None:
    net, x = make_net(), torch.randn(64, 32)
    offload_by_rule(net)
    loss = compiled(net, [])(x).square().mean()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(parameter.grad, one) for parameter, one in zip(net.parameters(), first, strict=True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("leaves")
def test_what_forward_also_returns_stays() -> None:
    net, graphs = make_net(), list[fx.GraphModule]()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = recollect.checkpoint(net[0], policy=Decision.OFFLOAD)(x)  # a policy that is made while it is traced
        return hidden, recollect.checkpoint(net[1], policy=Decision.OFFLOAD)(hidden)

    hidden, result = compiled(run, graphs)(torch.randn(64, 32))  # type: ignore[arg-type]
    (hidden.sum() + result.square().sum()).backward()
    outputs: Any = next(iter(graphs[0].graph.find_nodes(op="output"))).args[0]
    assert not any(is_transfer(node) for node in outputs[:2])
    assert outputs[0] not in {node.args[0] for node in find(graphs[0], SEND)}


@pytest.mark.usefixtures("leaves")
def test_inductor_keeps_transfers_in_their_places_and_gradients() -> None:
    model, x = transformer(3, width=32), torch.randn(4, 16, 32)
    done = run_inductor(offload_products, model, x)
    for one, other in zip(done.gradients, run_plain(model, x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("leaves")
def test_a_budget_with_host_memory_recomputes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect._plan.sent_values._LEAST_BYTES", 1)
    model, x = transformer(6, width=32), torch.randn(4, 64, 32)
    found: list[partition.Partition] = []

    def run(budget: int | str, **options: Any) -> partition.Partition:
        found.clear()
        cut = partition.partitioner(budget=budget, report=found.append, **options)
        done = run_cut(cut, model, x, found, decompose=True)
        for one, other in zip(done.gradients, run_plain(model, x), strict=True):
            torch.testing.assert_close(one, other)
        return done.partition

    plain = run("1GiB").simulation
    budget = plain.held_bytes + (plain.peak_bytes - plain.held_bytes) // 2
    alone, both = run(budget), run(budget, tiers="host")
    assert both.sent
    assert both.sent <= both.kept
    assert not alone.sent
    assert both.simulation.peak_bytes <= budget
    assert both.simulation.recomputed_flops < alone.simulation.recomputed_flops


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tiers": "disk", "budget": "1GiB"},
            "compiled code can offload only to pinned host memory. Pass tiers='host'",
        ),
        ({"tiers": "hst", "budget": "1GiB"}, "tiers='hst': expected 'host'"),
        ({"tiers": "host", "plan": Decision.SAVE}, "tiers='host' has no effect without a budget"),
    ],
)
def test_tiers_that_have_no_effect_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        partition.partitioner(**options)


@pytest.mark.usefixtures("leaves")
def test_marks_of_others_are_left_to_torch() -> None:
    net, x, graphs = make_net(), torch.randn(64, 32), list[fx.GraphModule]()
    offload_by_rule(net)
    net = compiled(net, graphs)
    with config.patch(enable_activation_offloading=True):
        net(x).sum().backward()
    assert not any("cpu_offload" in node.name for node in graphs[0].graph.nodes)
    assert find(graphs[0], SEND)


def test_without_the_option_nothing_is_marked() -> None:
    net, graphs = make_net(), list[fx.GraphModule]()
    gradients(net, compiled(checkpoint_each(net), graphs), torch.randn(64, 32))
    assert not any(node.meta.get(MARK) for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("wrap", [checkpoint_each, apply_to_each])
@pytest.mark.parametrize(
    ("to", "words"),
    [("disk", "the tier 'disk'"), (("host", "disk"), "the tier 'host then disk'"), (recollect.offload, "options of")],
    ids=["disk", "chain", "options"],
)
def test_a_graph_refuses_what_it_cannot_offload_to(wrap: Any, to: Any, words: str) -> None:
    net = make_net()
    step = wrap(net, offload_inputs=True, offload_to=to() if callable(to) else to)
    with pytest.raises(Unsupported) as caught:
        compiled(step, [])(torch.randn(64, 32))
    said = str(caught.value)
    assert words in said
    assert "compiled code can offload only to pinned host memory. Leave offload_to out" in said


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks, after a graph break
@pytest.mark.parametrize("wrap", [checkpoint_each, apply_to_each])
def test_where_the_graph_may_break_such_regions_run_in_the_eager_engine(wrap: Any) -> None:
    net, x = make_net(), torch.randn(2**10, 32)
    plain = gradients(net, net, x)
    away = recollect.offload(tier="disk", min_bytes="1KiB")
    step = torch.compile(wrap(net, offload_inputs=True, offload_to=away), backend="aot_eager")
    ours = gradients(net, step, x)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    report = away.report()
    assert report.out_bytes + report.stayed_bytes > 0  # what is asked for too soon stays


def test_a_backend_that_runs_the_graph_as_it_is_offloads_by_the_eager_engine() -> None:
    net, x = make_net(), torch.randn(64, 32)
    plain = gradients(net, net, x)
    step = torch.compile(checkpoint_each(net, offload_inputs=True), backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "values that are already in host memory stay")
        ours = gradients(net, step, x)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_equal_blocks_that_offload_their_inputs_are_compiled_once() -> None:
    net, x = make_net(), torch.randn(64, 32)
    counter = CompileCounterWithBackend("aot_eager")
    regions = [torch.compile(recollect.checkpoint(block, offload_inputs=True), backend=counter) for block in net]
    for region in regions:
        region(x).sum().backward()
    plain = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for region in [torch.compile(recollect.checkpoint(block), backend=plain) for block in net]:
        region(x).sum().backward()
    assert counter.frame_count == plain.frame_count


def test_without_a_device_everything_stays() -> None:
    net, graphs = make_net(), list[fx.GraphModule]()
    compiled(offload_by_rule(net), graphs)(torch.randn(4, 32)).sum().backward()
    assert not any(map(is_transfer, graphs[0].graph.nodes))


def make_deep_net() -> nn.Sequential:
    """Products that take longer than the copies of what they are made of."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)) for _ in range(6)])


def held_after_forward(step: Any) -> int:
    x = torch.randn(2**13, 2048, device="cuda")
    for _ in range(2):
        step(x).square().mean().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = step(x).square().mean()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_device_the_memory_after_forward_is_lower(backend: str) -> None:
    net = make_deep_net().cuda()
    plain = held_after_forward(torch.compile(net, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    recollect.apply(net, {"*": Decision.OFFLOAD})
    ours = held_after_forward(torch.compile(net, backend=backend, fullgraph=True))
    assert ours < 0.7 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_device_inputs_of_regions_are_gone_after_forward(backend: str) -> None:
    net = make_deep_net().cuda()
    full = held_after_forward(torch.compile(checkpoint_each(net), backend=backend, fullgraph=True))
    torch._dynamo.reset()
    away = checkpoint_each(net, offload_inputs=True)
    ours = held_after_forward(torch.compile(away, backend=backend, fullgraph=True))
    assert ours < 0.7 * full


@pytest.mark.gpu
@pytest.mark.kernels
def test_on_a_device_gradients_are_those_of_the_compiled_step_bit_for_bit() -> None:
    net, x = make_deep_net().cuda(), torch.randn(2**13, 2048, device="cuda")
    plain = gradients(net, torch.compile(net, fullgraph=True), x)
    torch._dynamo.reset()
    recollect.apply(net, {"*": Decision.OFFLOAD})
    step = torch.compile(net, fullgraph=True)
    for _ in range(3):
        assert all(map(torch.equal, gradients(net, step, x), plain))
