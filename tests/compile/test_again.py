"""Graphs that hold regions already are traced again: exported, compiled anew, nested, saved and loaded."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as theirs

import recollect
from recollect import Decision, compat, policies
from recollect.compat import composable
from recollect.compat.higher_order import tag_activation_checkpoint, wrap_activation_checkpoint
from recollect.integrations.export import restore_regions
from tests.compile.counting import Step, assert_same, run_compiled, run_step


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.3).requires_grad_()


def f(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(torch.mm(x, w).sin(), w).exp()


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "checkpoint": lambda x, w: recollect.checkpoint(f)(x, w),
    "policy": lambda x, w: recollect.checkpoint(f, policy=policies.save_matmuls)(x, w),
    "compat": lambda x, w: compat.checkpoint(f, x, w, use_reentrant=False),
    "tag": lambda x, w: tag_activation_checkpoint(f, x, w),
    "wrap": lambda x, w: wrap_activation_checkpoint(f, x, w),
    "named": lambda x, w: recollect.name(f(x, w), "value"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_holds_a_region_is_compiled_again(way: str) -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    graph = torch._dynamo.export(WAYS[way])(x, w).graph_module
    first, again = run_compiled(WAYS[way], [x, w]), run_compiled(graph, [x, w])
    assert first.graphs.count("mm", "sin") == again.graphs.count("mm", "sin")
    assert_same(again, run_step(f, [x, w]))
    run_step(torch.compile(graph, backend="eager", fullgraph=True), [x, w])


def test_regions_nested_in_a_graph_that_is_traced_again() -> None:
    def outer(x: Tensor, w: Tensor) -> Tensor:
        return recollect.checkpoint(lambda x: recollect.checkpoint(f)(x, w).sin())(x)

    x, w = leaf(4, 4), leaf(4, 4)
    graph = torch._dynamo.export(outer)(x, w).graph_module
    found, expected = run_compiled(graph, [x, w]), run_compiled(outer, [x, w])
    assert found.graphs.count() == expected.graphs.count()


def test_a_function_made_inside_the_graph_names_its_region() -> None:
    def outer(x: Tensor) -> Any:
        def inner(x: Tensor) -> Tensor:
            return x.sin().exp()

        return tag_activation_checkpoint(inner, x)

    graph = torch._dynamo.export(outer)(leaf(2)).graph_module.graph
    (call,) = (node for node in graph.nodes if node.target is tag_activation_checkpoint)
    assert call.kwargs["recollect_region"][0] == "inner"


# Graphs inside a region's graph.


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(torch.mm(x, w).sin(), w).tanh()


def with_dropout(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.dropout(torch.mm(x, w).sin(), 0.5)


def chain(inner: Callable[..., Any]) -> Callable[..., Any]:
    nested = torch.compiler.nested_compile_region(inner)

    def call(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = nested(x, w).sin()
        return x

    return call


def saved(step: Step) -> int:
    (output,) = step.graphs.forward[0].graph.find_nodes(op="output")
    return sum(node.op != "placeholder" for node in output.args[0][1:] if node is not None)


def test_a_nested_graph_is_recomputed_as_a_unit() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    call = chain(block)
    ours = run_compiled(recollect.checkpoint(call), [x, w])
    torchs = run_compiled(lambda x, w: theirs.checkpoint(call, x, w, use_reentrant=False), [x, w])
    assert saved(ours) == saved(torchs) == 0
    assert saved(run_compiled(call, [x, w])) > 10
    assert ours.graphs.count("invoke_subgraph") == torchs.graphs.count("invoke_subgraph")
    assert_same(ours, run_step(call, [x, w]), exact=False)
    # Not with Inductor: there torch's nested regions have wrong gradients without any checkpoint (2.11, 2.13, CPU).


def test_a_policy_decides_inside_a_nested_graph() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    nested = run_compiled(recollect.checkpoint(chain(block), policy=policies.save_matmuls), [x, w])

    def flat(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = block(x, w).sin()
        return x

    expected = run_compiled(recollect.checkpoint(flat, policy=policies.save_matmuls), [x, w])
    assert nested.graphs.count() == expected.graphs.count()
    assert saved(nested) == saved(expected) < saved(run_compiled(chain(block), [x, w]))
    assert_same(nested, expected)


@pytest.mark.parametrize("way", ["full", "contexts"])
def test_a_nested_graph_that_draws_numbers_draws_them_once(way: str) -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    call = chain(with_dropout)

    def contexts() -> Any:
        return compat.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def region(x: Tensor, w: Tensor) -> Any:
        if way == "full":
            return recollect.checkpoint(call)(x, w)
        return compat.checkpoint(call, x, w, use_reentrant=False, context_fn=contexts)

    found = run_compiled(region, [x, w])
    assert_same(found, run_step(chain_of_plain_dropout, [x, w]))


def chain_of_plain_dropout(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = with_dropout(x, w).sin()
    return x


def test_branches_in_a_nested_graph_have_right_gradients() -> None:
    def branch(x: Tensor, w: Tensor) -> Any:
        chosen: Any = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return torch.mm(chosen, w)

    x, w = leaf(4, 4), leaf(4, 4)
    nested = torch.compiler.nested_compile_region(branch)

    def f(x: Tensor, w: Tensor) -> Any:
        return nested(x, w).exp()

    found = run_compiled(recollect.checkpoint(f), [x, w])
    assert_same(found, run_step(lambda x, w: branch(x, w).exp(), [x, w]), exact=False)


# Exported programs.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.cos()).sin()  # type: ignore[no-any-return]


def in_place(net: Net, how: str) -> nn.Module:
    if how == "policy":
        recollect.apply(net, {"block": policies.save_matmuls})
    elif how == "full":
        recollect.apply(net, {"block": Decision.RECOMPUTE})
    elif how == "composable":
        composable.checkpoint(net.block)
    elif how == "wrapper":
        net.set_submodule("block", compat.checkpoint_wrapper(net.block))
    elif how == "call":
        inner = net.block
        net.forward = lambda x: recollect.checkpoint(inner, name="block")(x.cos()).sin()  # type: ignore[method-assign]
    else:
        inner = net.block
        net.forward = lambda x: compat.checkpoint(inner, x.cos(), use_reentrant=False).sin()  # type: ignore[method-assign]
    return net


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export.load, torch 2.13
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # the same, torch 2.11
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("how", "again"),
    [
        ("full", {"addmm": 2, "gelu": 1}),
        ("policy", {"addmm": 0, "gelu": 1}),
        ("call", {"addmm": 2, "gelu": 1}),
        ("compat", {"addmm": 2, "gelu": 1}),
        ("composable", {"addmm": 2, "gelu": 1}),
        ("wrapper", {"addmm": 2, "gelu": 1}),
    ],
)
def test_an_exported_program_keeps_its_regions_when_it_is_saved(how: str, again: dict[str, int], strict: bool) -> None:
    net, x = Net(), leaf(2, 4)
    weights = list(net.parameters())
    expected = run_step(net, [x])
    if strict and how in ("call", "compat"):
        pytest.skip("export does not trace a forward of an instance strictly")
    program = torch.export.export(in_place(net, how), (x,), strict=strict)
    assert run_compiled(program.module(), [x], of=weights).graphs.count(*again) == again
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(file)
    assert len(restore_regions(loaded)) == 1
    found = run_compiled(loaded.module(), [x])
    assert found.graphs.count("gelu") == {"gelu": 1}
    assert_same(found, expected)
    if not strict:  # what is loaded is the same then
        lowered = loaded.run_decompositions({})
        assert run_compiled(lowered.module(), [x]).graphs.count("gelu") == {"gelu": 1}


def test_exporting_says_how_regions_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="recollect"):
        torch.export.export(in_place(Net(), "full"), (leaf(2, 4),))
    assert "restore_regions(program)" in caplog.text


def test_a_program_without_regions_has_none_to_restore() -> None:
    assert restore_regions(torch.export.export(Net(), (leaf(2, 4),))) == []
