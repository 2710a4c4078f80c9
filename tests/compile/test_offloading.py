"""OFFLOAD in compiled code: one graph, its values kept and marked, and moved by torch's own pass where it is on."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
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


def test_without_a_device_the_pass_stays_off() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    net = make_net()
    compiled_net = compiled(offload_by_rule(net), [])
    compiled_net(torch.randn(4, 32)).sum().backward()
    assert not config.enable_activation_offloading


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_device_the_memory_after_forward_is_lower(backend: str) -> None:
    net = make_net().cuda()
    x = torch.randn(2**16, 32, device="cuda")

    def held(step: Any) -> int:
        for _ in range(2):
            step(x).square().mean().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = step(x).square().mean()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held

    with config.patch(enable_activation_offloading=False):
        plain = held(torch.compile(net, backend=backend, fullgraph=True))
        torch._dynamo.reset()
        recollect.apply(net, {"*": Decision.OFFLOAD})
        ours = held(torch.compile(net, backend=backend, fullgraph=True))
    assert ours < 0.7 * plain
