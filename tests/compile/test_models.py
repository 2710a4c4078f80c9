"""Models of Transformers with regions, compiled, beside Transformers' own switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule, Node

import recollect
from recollect import Decision, policies
from recollect._compile.tags import _flops
from recollect._core.operators import operator_of
from tests.compile.counting import Graphs

pytest.importorskip("transformers")

from tests.integrations.small_models import batch, build

ONE_GRAPH = ("llama", "gemma3", "mistral")
"""Those that Dynamo traces whole, with regions and without."""


def small(name: str) -> Any:
    """The model with few layers: each is compiled for itself."""
    model = build(name, layers=2 if name in ONE_GRAPH else None)
    if name == "gpt2":
        model.transformer.h = model.transformer.h[:1]  # Dynamo cuts it into several graphs as it is
    return model


def train(model: Any, call: Any, name: str) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(**batch(name)).loss
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def compiled(
    name: str, how: Any, *, backend: Any = "aot_eager", dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Gradients of a compiled step, and how many graphs it has."""
    torch._dynamo.reset()
    counters.clear()
    model = small(name)
    how(model)
    gradients = train(model, torch.compile(model, backend=backend, **options), name)
    return gradients, counters["stats"]["unique_graphs"]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_decoders_are_one_graph_with_a_policy(name: str) -> None:
    gradients, graphs = compiled(name, lambda model: recollect.apply(model, "selective"), fullgraph=True)
    assert graphs == 1
    model = small(name)
    assert_close(gradients, train(model, model, name))


def test_no_graph_is_made_of_what_stands_before_the_model() -> None:
    """With ``dynamic=True`` Dynamo made one of the sizes that the switch for caches of Transformers was called with."""
    _, graphs = compiled("llama", recollect.apply, dynamic=True)
    assert graphs == 1
    assert counters["frames"]["total"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks, and hides its warning otherwise
def test_a_model_that_dynamo_cuts_is_cut_no_more_than_plain() -> None:
    gradients, graphs = compiled("gpt2", lambda model: recollect.apply(model, {"*": policies.save_matmuls}))
    breaks = sum(counters["graph_break"].values())
    model = small("gpt2")
    assert_close(gradients, train(model, model, "gpt2"))
    assert graphs <= compiled("gpt2", lambda model: None)[1]
    assert breaks <= sum(counters["graph_break"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [{"model.layers.*": Decision.RECOMPUTE}, "selective"], ids=["full", "selective"])
def test_half_precision_on_a_device_through_inductor(rules: Any) -> None:
    device = torch.accelerator.current_accelerator()
    model, plain = (small("llama").to(device=device, dtype=torch.bfloat16) for _ in range(2))
    recollect.apply(model, rules)
    ids = batch("llama")["input_ids"].to(device)
    for one in (model, plain):
        call: Any = torch.compile(one, fullgraph=True)
        call(input_ids=ids, labels=ids).loss.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0.1, atol=0.05)


def test_backward_recomputes_no_more_than_with_the_switch() -> None:
    ours, switch, plain = (graphs_of(how) for how in (recollect.apply, switch_on, lambda model: None))
    mine, theirs = ours.count(), switch.count()
    assert not {op: count for op, count in mine.items() if count > theirs.get(op, 0)}
    assert mine["mm"] == theirs["mm"] > plain.count()["mm"]
    assert len(ours.dynamo) == len(switch.dynamo) == 1
    # What a region takes is kept, also where the compiler could make it again out of less: the rotary angles.
    assert saved_bytes(ours.forward[0]) <= 1.05 * saved_bytes(switch.forward[0]) < saved_bytes(plain.forward[0])


def switch_on(model: Any) -> None:
    model.config.use_cache = False  # the switch does so itself, with a log in the midst of the graph
    model.gradient_checkpointing_enable()


def graphs_of(how: Any) -> Graphs:
    graphs = Graphs()
    compiled("llama", how, backend=graphs.backend, fullgraph=True, dynamic=False)
    return graphs


def saved_bytes(graph: GraphModule) -> int:
    (output,) = graph.graph.find_nodes(op="output")
    made = [node for node in output.args[0] if isinstance(node, Node) and node.op != "placeholder"]
    tensors = [node.meta["val"] for node in made if isinstance(node.meta.get("val"), Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(
    "op",
    [
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ],
    ids=str,
)
def test_attention_of_a_device_is_counted_by_its_shapes(op: Any) -> None:
    graph = Graph()
    query, key = graph.placeholder("query"), graph.placeholder("key")
    query.meta["val"] = torch.empty(2, 4, 64, 8, device="meta")
    key.meta["val"] = torch.empty(2, 2, 64, 8, device="meta")
    rest = () if "flash" in str(op) else (None, True)
    call = graph.call_function(op, (query, key, key, *rest))
    call.meta["val"] = (query.meta["val"],)
    assert _flops(call, operator_of(op)) == 2 * 2 * 2 * 4 * 64 * 64 * 8
