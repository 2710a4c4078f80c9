"""What regions are given is not kept where less is enough to make it again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import recollect
from recollect._compile.inductor import _arranging

LENGTH = 16


def kept_by(step: Callable[..., Tensor], *given: Tensor) -> tuple[set[tuple[int, ...]], list[Tensor | None]]:
    """The shapes that a compiled step keeps beside its inputs, cut as for Inductor, and gradients of what is given."""
    torch._dynamo.reset()
    shapes: set[tuple[int, ...]] = set()
    cut = _arranging(min_cut_rematerialization_partition)

    def note(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        forward, backward = cut(joint, inputs, **options)
        (results,) = next(iter(forward.graph.find_nodes(op="output"))).args
        assert isinstance(results, (tuple, list))
        kept = [one for one in results[options["num_fwd_outputs"] :] if isinstance(one, fx.Node)]
        shapes.update(tuple(one.meta["val"].shape) for one in kept if one.op != "placeholder")
        return forward, backward

    def run(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=note)
    torch.compile(step, backend=backend, fullgraph=True)(*given).backward()
    return shapes, [one.grad for one in given]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@recollect.checkpoint
def attend(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT + mask).softmax(-1) @ x


def masked(x: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    mask = torch.where(places[:, None] >= places, 0.0, -1e9)
    return attend(attend(x, mask), mask).sum()


def test_a_mask_is_not_kept() -> None:
    x = leaf(LENGTH, 4)
    shapes, (found,) = kept_by(masked, x)
    assert (LENGTH, LENGTH) not in shapes
    (expected,) = torch.autograd.grad(masked(x), x)
    torch.testing.assert_close(found, expected)


@recollect.checkpoint
def narrow(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w).sin()


def widened(x: Tensor, w: Tensor) -> Tensor:
    return narrow(narrow(x, w[:, :2])[:, :1].expand(-1, LENGTH) * 2, w).sum()


def test_what_comes_of_another_region_is_kept() -> None:
    x, w = leaf(4, LENGTH), leaf(LENGTH, LENGTH)
    shapes, found = kept_by(widened, x, w)
    assert (4, LENGTH) in shapes
    for gradient, expected in zip(found, torch.autograd.grad(widened(x, w), [x, w]), strict=True):
        torch.testing.assert_close(gradient, expected)


def counting(x: Tensor, count: Tensor) -> Tensor:
    mask = count[:, None] * torch.arange(LENGTH)
    result = attend(x, mask)
    count.add_(1)
    return result.sum()


def test_what_is_made_of_an_input_that_is_written_into_is_kept() -> None:
    x, count = leaf(LENGTH, 4), torch.ones(LENGTH)
    (expected,) = torch.autograd.grad(counting(x, count.clone()), x)
    shapes, (found, _) = kept_by(counting, x, count)
    assert (LENGTH, LENGTH) in shapes
    torch.testing.assert_close(found, expected)
