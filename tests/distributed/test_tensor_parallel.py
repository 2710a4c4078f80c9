"""Tensor parallelism inside regions: distributed tensors are kept or made again, and nothing kept is sent again."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import recollect
from recollect import policies
from tests.distributed.comparing import count_collectives, repeated
from tests.distributed.launch import Ranks


class Block(nn.Module):
    """A transformer block's MLP, with a norm and dropout, in the sequence-parallel style."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = recollect.name(gelu(self.up(self.norm(x))), "hidden")
        return self.drop(x + self.down(h))  # type: ignore[no-any-return]


def make_block(style: str) -> Block:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    block = Block()
    if style == "tensor":
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    else:
        plan = {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
    parallelize_module(block, mesh, plan)
    if style == "sequence":
        parallelize_module(
            block, mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        )
    return block


POLICIES: dict[str, Any] = {
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "matmuls": policies.save_matmuls,
    "ops": policies.save_ops("aten.gelu.default", "aten.native_layer_norm.default"),
    "modules": policies.save_modules("up"),
    "names": policies.save_names("hidden"),
    "random": policies.save_random,
}


def run_block(style: str, keep: str) -> list[Counter[str]]:
    block = make_block(style)
    options = {} if keep == "full" else {"policy": POLICIES[keep]}
    region = recollect.checkpoint(block, **options)
    return repeated(block, region, block.parameters(), shape=(4, 8))


KEPT = {
    "nothing": (),
    "all": ("aten.addmm", "aten.native_layer_norm", "aten.gelu", "aten.add", "aten.bernoulli_"),
    "matmuls": ("aten.addmm",),
    "ops": ("aten.gelu", "aten.native_layer_norm"),
    "names": ("aten.gelu",),
    "random": ("aten.bernoulli_",),
    "modules": (),
    "full": (),
}


@pytest.mark.parametrize("style", ["tensor", "sequence"])
@pytest.mark.parametrize("keep", KEPT)
def test_gradients_are_to_the_bit_and_what_is_kept_is_not_run_again(ranks: Ranks, style: str, keep: str) -> None:
    for counts in ranks.run(run_block, style, keep):
        for count in counts:
            assert count_collectives(count) == 0
            assert [name for name in KEPT[keep] if count[name]] == []
            assert count["aten.addmm"] == {"all": 0, "matmuls": 0, "modules": 1}.get(keep, 2)


def run_strictly(style: str) -> list[int]:
    block = make_block(style)
    region = recollect.checkpoint(block, policy=policies.strictly(policies.save_nothing))
    return [count_collectives(count) for count in repeated(block, region, block.parameters(), shape=(4, 8))]


def test_a_strict_policy_sends_again(ranks: Ranks) -> None:
    assert ranks.run(run_strictly, "tensor") == [[1] * 4] * 2


class Mixed(nn.Module):
    """Distributed and plain tensors, laid out anew in the open, by operators on their own, and in place."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(2)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), self.mesh, [Shard(1)]))
        self.bias = nn.Parameter(distribute_tensor(torch.randn(8), self.mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        rows: Any = DTensor.from_local(x, self.mesh, [Shard(0)])
        h = rows @ self.weight  # lays out the rows anew
        h = (h + self.bias).sin()
        spread = h.redistribute(self.mesh, [Shard(0)])
        summed: Any = DTensor.from_local(spread.to_local().cos(), self.mesh, [Partial()])
        whole = summed.redistribute(self.mesh, [Replicate()], async_op=True)
        h = whole * 2.0 + h.cos()[: whole.shape[0], :1]
        h = h.redistribute(self.mesh, [Shard(0)])
        buffer = h.detach().clone()
        buffer.mul_(whole.detach().redistribute(self.mesh, [Shard(0)]))
        first = (h * buffer.clone()).tanh()
        buffer.to_local().zero_()
        out: Tensor = (first + buffer).full_tensor()
        return out.exp() * x.sum() + x.repeat(out.shape[0] // x.shape[0], 1).cos()


MIXED: dict[str, Any] = {
    "full": None,
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "matmuls": policies.save_matmuls,
    "pointwise": policies.save_ops("aten.sin.default", "aten.mul.Tensor"),
    "strict": policies.strictly(policies.save_nothing),
}


def run_mixed(keep: str) -> list[int]:
    warnings.filterwarnings("ignore", message="policy .* this step")
    warnings.filterwarnings("ignore", category=FutureWarning)
    module = Mixed()
    region = recollect.checkpoint(module, policy=MIXED[keep])
    counts = repeated(module, region, module.parameters(), shape=(4, 8))
    return [count_collectives(count) for count in counts]


@pytest.mark.parametrize("keep", MIXED)
def test_layouts_that_change_inside_of_operators_are_not_sent_again(ranks: Ranks, keep: str) -> None:
    for counts in ranks.run(run_mixed, keep):
        assert min(counts) > 0 if keep == "strict" else counts == [0] * 4
