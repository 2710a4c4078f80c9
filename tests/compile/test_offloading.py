"""OFFLOAD in compiled code: one graph, its values kept and marked, and moved by torch's own pass where it is on."""

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


def offload_by_rule(net: nn.Sequential) -> nn.Module:
    recollect.apply(net, {"*": Decision.OFFLOAD})
    return net


def offload_by_wrapper(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(*map(compat.offload_wrapper, net))


@pytest.mark.parametrize("offload", [offload_by_rule, offload_by_wrapper])
@pytest.mark.parametrize("moves", [False, True])
def test_a_graph_offloads_what_it_keeps(offload: Any, moves: bool) -> None:
    net, x = make_net(), torch.randn(64, 32)
    plain = gradients(net, net, x)
    graphs: list[fx.GraphModule] = []
    with config.patch(enable_activation_offloading=moves):
        ours = gradients(net, compiled(offload(net), graphs), x)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)
    forward, backward = graphs
    marked = [node for node in forward.graph.nodes if node.meta.get("should_offload")]
    assert marked
    copies = [node for node in forward.graph.nodes if "cpu_offload" in node.name]
    assert bool(copies) == moves
    assert not backward.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)  # nothing runs again


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
def test_a_graph_offloads_inputs_of_regions(wrap: Any, moves: bool) -> None:
    net, x = make_net(), torch.randn(64, 32)
    plain = gradients(net, net, x)
    graphs: list[fx.GraphModule] = []
    with config.patch(enable_activation_offloading=moves):
        ours = gradients(net, compiled(wrap(net, offload_inputs=True), graphs), x)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)
    forward, backward = graphs
    copies = [node for node in forward.graph.nodes if "cpu_offload" in node.name and not node.name.startswith("wait")]
    sources = {node.args[0] for node in copies}
    made = list(forward.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default))
    assert len(made) == 6
    assert sources == ({made[1], made[3]} if moves else set())  # what the first block and the second give
    again = list(backward.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default))
    assert len(again) == 3  # each block runs again up to its last product


def test_without_the_option_nothing_is_marked() -> None:
    net, graphs = make_net(), list[fx.GraphModule]()
    gradients(net, compiled(checkpoint_each(net), graphs), torch.randn(64, 32))
    assert not any(node.meta.get("should_offload") for node in graphs[0].graph.nodes)


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


def test_without_a_device_the_pass_stays_off() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    net = make_net()
    compiled_net = compiled(offload_by_rule(net), [])
    compiled_net(torch.randn(4, 32)).sum().backward()
    assert not config.enable_activation_offloading


def held_after_forward(step: Any) -> int:
    x = torch.randn(2**16, 32, device="cuda")
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
    net = make_net().cuda()
    with config.patch(enable_activation_offloading=False):
        plain = held_after_forward(torch.compile(net, backend=backend, fullgraph=True))
        torch._dynamo.reset()
        recollect.apply(net, {"*": Decision.OFFLOAD})
        ours = held_after_forward(torch.compile(net, backend=backend, fullgraph=True))
    assert ours < 0.7 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_device_inputs_of_regions_are_gone_after_forward(backend: str) -> None:
    net = make_net().cuda()
    with config.patch(enable_activation_offloading=False):
        full = held_after_forward(torch.compile(checkpoint_each(net), backend=backend, fullgraph=True))
        torch._dynamo.reset()
        away = checkpoint_each(net, offload_inputs=True)
        ours = held_after_forward(torch.compile(away, backend=backend, fullgraph=True))
    assert ours < 0.7 * full
