"""Cheap values of recomputed regions are made again where gradients need them, not held."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import recollect
from recollect import policies
from recollect._compile.copies import _Copying, copy_cheap_values
from tests.compile.graphs import Block, transformer
from tests.compile.test_ordering import measure_peak

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Cut:
    """torch's partitioner, and copies in what it gives; notes what gradients read of recomputation before and after."""

    def __init__(self) -> None:
        self.added = 0
        self.read: list[list[str]] = []

    def __call__(self, *args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(*args, **options)
        self.read.append(read_by_gradients(backward))
        self.added = copy_cheap_values(backward)
        self.read.append(read_by_gradients(backward))
        return forward, backward


def read_by_gradients(backward: fx.GraphModule) -> list[str]:
    """The operators outside of copies whose results gradients, or copies, read."""
    late = {node for node in backward.graph.nodes if node.op == "placeholder" and "tangents" in node.name}
    for node in backward.graph.nodes:
        if any(source in late for source in node.all_input_nodes) or node.target is control_deps:
            late.add(node)
    early = [node for node in backward.graph.nodes if node.op == "call_function" and node not in late]
    return [str(node.target) for node in early if not late.isdisjoint(node.users)]


def run(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    loss: Tensor = call(x).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_gradients_read_products_and_make_the_rest_again(policy: Any) -> None:
    model, x, cut = transformer(layers=1), torch.randn(2, 8, 16), Cut()
    expected = run(model, model, x)
    backend = aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module), partition_fn=cut, decompositions=select_decomp_table()
    )
    found = run(model, torch.compile(recollect.checkpoint(model, policy=policy), backend=backend), x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    before, after = cut.read
    assert cut.added > 0
    assert sum("mul" in op or "erf" in op for op in after) < sum("mul" in op or "erf" in op for op in before)


def test_a_graph_without_regions_has_no_copies() -> None:
    model, x, cut = transformer(layers=1), torch.randn(2, 8, 16), Cut()
    backend = aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module), partition_fn=cut)
    run(model, torch.compile(model, backend=backend), x)
    assert cut.added == 0


def test_a_graph_of_several_regions_has_no_copies() -> None:
    """There torch makes nothing twice either, and each copy would be one more kernel."""
    model, x, cut = transformer(layers=2), torch.randn(2, 8, 16), Cut()
    backend = aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module), partition_fn=cut, decompositions=select_decomp_table()
    )
    first, second = (recollect.checkpoint(layer) for layer in model.children())

    def both(x: Tensor) -> Any:
        return second(first(x))

    run(model, torch.compile(both, backend=backend), x)
    assert any("mul" in op for op in cut.read[0])
    assert cut.added == 0


def test_copies_wait_for_the_product_before_their_use_unless_others_before_them_do() -> None:
    graph = fx.Graph()
    kept, tangent = graph.placeholder("kept"), graph.placeholder("tangents_1")
    view = graph.call_function(aten.t.default, (kept,))
    sine = graph.call_function(aten.sin.default, (view,))
    cosine = graph.call_function(aten.cos.default, (sine,))
    product = graph.call_function(aten.mm.default, (tangent, tangent))
    result = graph.call_function(aten.mul.Tensor, (product, cosine))
    graph.output(result)
    copying = _Copying(graph, {tangent, product, result}, {view, sine, cosine})
    copying.run()
    assert [node.target for node in copying.made] == [aten.t.default, aten.sin.default, aten.cos.default]
    assert [(node.target, product_) for node, product_ in copying.waits().items()] == [(aten.sin.default, [product])]
    assert not cosine.users


def train(call: Any, x: Tensor) -> None:
    call(x).square().mean().backward()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11, at its first use
def test_a_block_compiled_by_inductor_takes_no_more_than_a_checkpoint_around_it() -> None:
    """Which makes cheap values twice: in its recomputation, and in the backward that torch has cut from it."""
    torch.manual_seed(0)
    x = torch.randn(2, 256, 64, requires_grad=True)
    peaks = {}
    with fresh_cache(), inductor_config.patch(compile_threads=1):
        for way in ("ours", "torch's"):
            torch._dynamo.reset()
            block = Block(64, 0.0)
            for parameter in block.parameters():
                parameter.grad = torch.zeros_like(parameter)
            ours, compiled = torch.compile(recollect.checkpoint(block)), torch.compile(block)
            theirs = functools.partial(checkpoint, compiled, use_reentrant=False)
            step = functools.partial(train, ours if way == "ours" else theirs, x)
            for _ in range(2):
                step()
            peaks[way] = measure_peak(step)
    assert peaks["ours"] <= 1.01 * peaks["torch's"]
