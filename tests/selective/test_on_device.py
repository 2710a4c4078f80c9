"""Policies on an accelerator: its generators, its allocator, no waiting for it, and captured graphs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint as torchs

import recollect
from recollect import policies
from tests.waiting import refusing_to_wait

pytestmark = pytest.mark.gpu

MATMULS_AND_ATTENTION = policies.first_match(policies.save_matmuls, policies.save_attention)
POLICIES = {
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "matmuls and attention": MATMULS_AND_ATTENTION,
    "random": policies.save_random,
    "linear layers": policies.save_modules(nn.Linear),
    "names": policies.save_names("attention", "gated"),
}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = recollect.region("attention")(F.scaled_dot_product_attention)(q, k, v)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        gated = recollect.name(F.gelu(self.up(x)), "gated")
        out: Tensor = x + self.dropout(self.down(gated))
        return out


def make(width: int, dropout: float, dtype: torch.dtype = torch.float32) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = Block(width, dropout).to("cuda", dtype)
    return block, torch.randn(2, 64, width, device="cuda", dtype=dtype, requires_grad=True)


def gradients(call: Callable[..., Any], block: Block, x: Tensor, *, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    found = torch.autograd.grad(call(x).square().sum(), [x, *block.parameters()])
    return [*found, torch.rand(4, device="cuda"), torch.rand(4)]


@pytest.mark.filterwarnings("ignore:policy .* this step")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_and_generators_are_those_of_the_plain_step(policy: str, dropout: float) -> None:
    block, x = make(64, dropout)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # bitwise repeatable
        for seed in range(3):
            expected = gradients(block, block, x, seed=seed)
            region = recollect.checkpoint(block, policy=POLICIES[policy])
            assert all(map(torch.equal, gradients(region, block, x, seed=seed), expected))


def test_learned_calls_do_not_wait_for_the_device() -> None:
    block, x = make(64, 0.1)
    for policy in (MATMULS_AND_ATTENTION, policies.save_modules(nn.Linear)):
        region = recollect.checkpoint(block, policy=policy)
        for _ in range(2):
            region(x).sum().backward()
        with refusing_to_wait():
            region(x).sum().backward()


def peak_bytes(step: Callable[[], None]) -> int:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def test_the_peak_is_not_above_that_of_torchs_selective_checkpointing() -> None:
    blocks = [make(1024, 0.0, torch.bfloat16)[0] for _ in range(6)]
    x = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    aten = torch.ops.aten
    kept = [
        *(aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention.default),
        *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
    ]
    contexts = functools.partial(torchs.create_selective_checkpoint_contexts, kept)

    def run(call: Callable[..., Any]) -> None:
        y = x
        for block in blocks:
            y = call(block, y)
        y.sum().backward()

    ours = peak_bytes(lambda: run(lambda block, y: recollect.checkpoint(block, policy=MATMULS_AND_ATTENTION)(y)))
    theirs = peak_bytes(
        lambda: run(lambda block, y: torchs.checkpoint(block, y, use_reentrant=False, context_fn=contexts))
    )
    assert ours <= 1.01 * theirs


@pytest.mark.parametrize("policy", [MATMULS_AND_ATTENTION, policies.save_modules(nn.Linear)], ids=str)
def test_a_step_under_a_policy_can_be_captured(policy: Any) -> None:
    block, x = make(64, 0.0)
    region = recollect.checkpoint(block, policy=policy)

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(region(x).square().sum(), [x, *block.parameters()]))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, expected)


def triton_functions() -> tuple[Any, type[torch.autograd.Function], list[str]]:
    """A Triton kernel as an operator and inside a custom Function, and the runs of the latter's forward."""
    pytest.importorskip("triton")
    from tests.selective.kernels import twice

    runs: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            runs.append("forward")
            ctx.save_for_backward(x)
            return twice(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            grown: Tensor = 2 * gradient + 0 * x
            return grown

    operator = torch.library.custom_op("recollect_device::twice", mutates_args=())(twice)
    operator.register_autograd(lambda _, gradient: 2 * gradient)
    return operator, Twice, runs


def test_triton_kernels_are_kept_as_a_unit_or_run_again() -> None:
    operator, function, runs = triton_functions()
    w = torch.randn(64, 64, device="cuda", requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        y: Any = function.apply((x @ w).sin())
        out: Tensor = (operator(y.cos()) @ w).sin()
        return out

    for policy, again in (
        (policies.save_ops(function, "recollect_device.twice.default"), 0),
        (policies.save_ops("recollect_device.twice.default"), 1),
        (policies.save_matmuls, 1),
    ):
        region = recollect.checkpoint(fn, policy=policy, name=str(policy))
        for _ in range(3):
            x = torch.randn(64, 64, device="cuda", requires_grad=True)
            expected = torch.autograd.grad(fn(x).sum(), [x, w])
            runs.clear()
            found = torch.autograd.grad(region(x).sum(), [x, w])
            assert all(map(torch.equal, found, expected))
            assert len(runs) == 1 + again
