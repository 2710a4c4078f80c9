"""What compilers around a region see of it: compiled autograd, backends that run graphs as they are, mismatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import recollect
from recollect import compat


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.3).requires_grad_()


def f(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(torch.mm(x, w).sin(), w).exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks, and hides its warning otherwise
def test_compiled_autograd_does_not_trace_the_reentrant_backward() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    loss = compat.checkpoint(f, x, w, use_reentrant=True).square().sum()
    counters.clear()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    assert sum(counters["graph_break"].values()) <= 2
    for found, expected in zip((x.grad, w.grad), torch.autograd.grad(f(x, w).square().sum(), (x, w)), strict=True):
        assert found is not None
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_region_with_a_side_effect_returns_no_more_than_what_is_used(leaks: bool) -> None:
    seen: list[Any] = []

    def g(x: Tensor, w: Tensor) -> Tensor:
        first = torch.mm(x, w).sin()
        seen.append(first if leaks else 1)
        return torch.mm(torch.mm(first, w).sin(), w).exp()

    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    x, w = leaf(4, 4), leaf(4, 4)
    out = torch.compile(lambda x, w: recollect.checkpoint(g)(x, w) * 2, backend=backend, fullgraph=True)(x, w)
    assert len(seen) == 1
    (body,) = (part for name, part in graphs[0].named_modules() if name)
    (output,) = body.graph.find_nodes(op="output")
    assert len(output.args[0]) == 1 + leaks
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(g(x, w).sum() * 2, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks, and hides its warning otherwise
def test_a_mismatch_says_what_was_compiled_again_and_what_to_do() -> None:
    size = [2]

    @torch.compile(backend="aot_eager", dynamic=False)
    def body(x: Tensor) -> Tensor:
        return x.sin().exp().cos()

    def g(x: Tensor) -> Tensor:
        return body(x[: size[0]]).sum()

    x = torch.ones(4, requires_grad=True)
    loss = recollect.checkpoint(g)(x)
    size[0] = 3
    with pytest.raises(recollect.MismatchError) as caught:
        loss.backward()
    text = str(caught.value)
    assert "Or recomputation ran a different compiled version than forward did. torch.compile has recompiled:" in text
    assert "body (test_around.py:" in text
    assert "torch._dynamo.mark_dynamic(tensor, dim)" in text
    assert "TORCH_LOGS=recompiles" in text


def test_a_mismatch_without_compiled_code_says_nothing_of_it() -> None:
    size = [2]
    x = torch.ones(4, requires_grad=True)
    loss = recollect.checkpoint(lambda x: x[: size[0]].sin().exp().sum())(x)
    size[0] = 3
    with pytest.raises(recollect.MismatchError) as caught:
        loss.backward()
    assert "compile" not in str(caught.value)
