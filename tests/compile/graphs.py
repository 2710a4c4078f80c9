"""Small models compiled with a partitioner of ours, and what came out: gradients, graphs, memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F  # noqa: N812

from recollect._compile.partition import Partition, Partitioner, partitioner
from recollect._core.plans import Plan
from recollect._profile.memory import LiveBytes

Cut = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


def transformer(layers: int = 2, width: int = 16, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dropout) for _ in range(layers)))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 8))


@dataclass
class Compiled:
    """A step that was compiled and run."""

    gradients: list[Tensor]
    loss: Tensor
    partitions: list[Partition]
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    backward_peak_bytes: int = 0
    partitioner: Partitioner | None = None

    @property
    def partition(self) -> Partition:
        (one,) = self.partitions
        return one

    @property
    def recomputed(self) -> list[str]:
        calls = self.partition.profile.calls
        return [calls[number].op for number in self.partition.simulation.recomputed_calls]

    @property
    def kept(self) -> list[str]:
        """The operators whose results forward keeps for backward, with their modules."""
        profile, kept = self.partition.profile, self.partition.kept
        made = (one for one in profile.made() if one.call < profile.forward_count and one.storage in kept)
        return [f"{profile.calls[one.call].module}:{profile.calls[one.call].op}" for one in made]


def run_plain(model: nn.Module, x: Tensor, seed: int = 1) -> list[Tensor]:
    return _step(model, model, x, seed)[0]


def run_compiled(plan: Any, model: nn.Module, x: Tensor, **options: Any) -> Compiled:
    """A step cut as `plan` says, each node run on its own."""
    found: list[Partition] = []
    return run_cut(partitioner(plan, report=found.append), model, x, found, **options)


def run_cut(
    cut: Cut, model: nn.Module, x: Tensor, found: list[Partition], *, decompose: bool = False, **options: Any
) -> Compiled:
    """A step cut by any partitioner, each node run on its own and freed as soon as the graph lets go of it.

    Args:
        cut: the partitioner.
        model: what runs.
        x: its input.
        found: where the partitioner reports to.
        decompose: whether operators are taken apart as for Inductor.
        options: of torch.compile.
    """
    torch._dynamo.reset()
    done = Compiled([], torch.empty(0), found)

    def compile_forward(graph: fx.GraphModule, _: Any) -> Any:
        done.forward = graph
        return _boxed(lambda args: fx.Interpreter(graph).boxed_run(args))

    def compile_backward(graph: fx.GraphModule, _: Any) -> Any:
        done.backward = graph
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]

        def run(args: list[Any]) -> Any:
            named = [arg for name, arg in zip(names, args, strict=True) if "primals" in name]
            held = {id(arg.untyped_storage()): arg for arg in named if isinstance(arg, Tensor)}
            held_bytes = sum(arg.untyped_storage().nbytes() for arg in held.values())
            del held, named
            with LiveBytes(include=[arg for arg in args if isinstance(arg, Tensor)]) as meter:
                results = fx.Interpreter(graph).boxed_run(args)
            done.backward_peak_bytes = meter.peak_bytes - held_bytes
            return results

        return _boxed(run)

    backend = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        partition_fn=cut,
        decompositions=select_decomp_table() if decompose else None,
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    done.gradients, done.loss = _step(compiled, model, x)
    return done


def run_inductor(plan: Any, model: nn.Module, x: Tensor, **options: Any) -> Compiled:
    """A step cut as `plan` says and compiled by Inductor."""
    torch._dynamo.reset()
    found: list[Partition] = []
    cut = partitioner(plan, report=found.append)
    compiled = torch.compile(model, options={"custom_partitioner_fn": cut}, fullgraph=True, **options)
    gradients, loss = _step(compiled, model, x)
    return Compiled(gradients, loss, found, partitioner=cut)


def _step(compiled: Any, model: nn.Module, x: Tensor, seed: int = 1) -> tuple[list[Tensor], Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    loss = compiled(x).square().mean()
    loss.backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient for gradient in gradients if gradient is not None], loss.detach()


def _boxed(function: Any) -> Any:
    function._boxed_call = True
    return function


NOTHING = Plan()
"""A plan that leaves all to torch."""
