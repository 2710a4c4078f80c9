"""Convolutions and attention take memory while they run: plans of compiled graphs count it."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recollect._compile.workspaces import workspaces_of
from tests.compile.test_budgets import run_within

BATCH, WIDTH, SIDE = 4, 64, 16


def make_graph(target: Any, *values: Any, result: Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    args = []
    for number, value in enumerate(values):
        node: Any = value
        if isinstance(value, Tensor):
            node = graph.placeholder(f"given_{number}")
            node.meta["val"] = value
        args.append(node)
    call = graph.call_function(target, tuple(args))
    call.meta["val"] = result
    graph.output(call)
    return fx.GraphModule(nn.Module(), graph)


def count(module: fx.GraphModule, *, has_channels_last: bool = False) -> int:
    (call,) = module.graph.find_nodes(op="call_function", target=next(_targets(module)))
    return workspaces_of(module, has_channels_last=has_channels_last)(call)


def _targets(module: fx.GraphModule) -> Any:
    return (node.target for node in module.graph.nodes if node.op == "call_function")


def test_on_cuda_attentions_backward_holds_gradients_in_float32() -> None:
    with FakeTensorMode():
        query = torch.empty(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    module = make_graph(flash, query, query, query, query, query, result=query)
    assert count(module) >= 4 * query.numel()


def test_on_cuda_images_that_inductor_turns_need_no_copy() -> None:
    with FakeTensorMode():
        image = torch.empty(BATCH, WIDTH, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(WIDTH, WIDTH, 3, 3, device="cuda", dtype=torch.bfloat16)
        module = make_graph(
            torch.ops.aten.convolution.default,
            *(image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            result=image,
        )
        assert count(module) >= 2 * image.numel() * 2
        assert count(module, has_channels_last=True) == 0


def test_products_and_what_is_pointwise_take_nothing() -> None:
    square = torch.empty(4, 4)
    assert not count(make_graph(torch.ops.aten.mm.default, square, square, result=square))
    assert not count(make_graph(torch.ops.aten.sin.default, square, result=square))


@pytest.mark.parametrize(
    ("channels", "groups", "images"),
    [pytest.param(16, 1, 0, id="plain"), pytest.param(16, 16, 3, id="depthwise"), pytest.param(8, 1, 1.7, id="few")],
)
def test_the_judge_of_graphs_counts_them(channels: int, groups: int, images: float) -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(channels, channels, 3, padding=1, groups=groups) for _ in range(2)))
    x = torch.randn(2, channels, 8, 8)
    found = run_within("fastest", model, x).partition.profile
    taken = {call.op: call.workspace_bytes for call in found.calls}
    weight = channels * channels // groups * 9 * 4
    assert taken["aten.convolution.default"] == weight + (x.nbytes if groups > 1 else 0)
    assert taken["aten.convolution_backward.default"] == 2 * weight + int(images * x.nbytes)


@pytest.mark.parametrize(
    ("side", "is_last", "is_turned", "parts"),
    [(7, True, False, 258), (7, False, True, 258), (7, True, True, 258), (3, True, False, 2), (7, False, False, 2)],
)
def test_wide_depthwise_gradients_are_added_up_in_parts_where_channels_come_last(
    side: int, is_last: bool, is_turned: bool, parts: int
) -> None:
    layout = torch.channels_last if is_last else torch.contiguous_format
    image, weight = torch.empty(2, 32, 16, 16).to(memory_format=layout), torch.empty(32, 1, side, side)
    module = make_graph(
        torch.ops.aten.convolution_backward.default,
        *(image, image, weight, [32], [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], 32, [True] * 3),
        result=image,
    )
    assert count(module, has_channels_last=is_turned) == parts * weight.nbytes + (1 if parts > 2 else 3) * image.nbytes
