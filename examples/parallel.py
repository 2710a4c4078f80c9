"""A training loop in the style of torchtitan: tensor parallelism, a plan, torch.compile and FSDP2, in this order.

    torchrun --nproc-per-node 2 examples/parallel.py                      sharded over two processes
    torchrun --nproc-per-node 2 examples/parallel.py --tensor-parallel 2  each matrix product split over two
    torchrun --nproc-per-node 8 examples/parallel.py --tensor-parallel 2 --layers 32 --dim 4096 --budget 60%

On GPUs it uses NCCL and Inductor, elsewhere gloo and `backend="eager"`.
"""

import argparse
import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import recollect

VOCABULARY, HEAD = 256, 16


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Under tensor parallelism each process has some of the heads.
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, 4 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(dim), Attention(dim)
        self.norm2, self.feed_forward = nn.RMSNorm(dim), FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    """A small decoder; gives the loss."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make_plan(args: argparse.Namespace, device: str) -> recollect.Plan:
    """What each process keeps: found by the first one on fake tensors, so that no memory is needed, and told to all."""
    with torch.device("meta"):
        model, tokens = Model(args.layers, args.dim), torch.zeros(args.batch_size, args.length, dtype=torch.long)
    found: list[recollect.Plan | None] = [None]
    if distributed.get_rank() == 0:
        plain = recollect.profile(model, tokens, tokens, dry=True, device=device, optimizer=torch.optim.AdamW)
        share, percent, _ = args.budget.partition("%")
        budget = plain.peak_bytes * int(share) // 100 if percent else args.budget
        found = [recollect.plan(plain, budget=budget)]
        print(found[0])
    distributed.broadcast_object_list(found, src=0)
    (plan,) = found
    assert plan is not None
    return plan


def parallelize(model: Model, mesh: DeviceMesh, plan: recollect.Plan, backend: str) -> None:
    split = {
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.out": RowwiseParallel(),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(),
    }
    if mesh["tensor"].size() > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tensor"], split)
    handle = recollect.apply(model, plan)
    if distributed.get_rank() == 0:
        print(handle)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def parse(options: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", default="70%", help="bytes, or a share of what the plain step would take")
    parser.add_argument("--backend", help="backend of torch.compile")
    return parser.parse_args(options)


def train(args: argparse.Namespace, device: str) -> list[float]:
    """Plan, parallelize and train; gives the losses of this process."""
    size = distributed.get_world_size()
    mesh = init_device_mesh(
        device, (size // args.tensor_parallel, args.tensor_parallel), mesh_dim_names=("data", "tensor")
    )

    backend = args.backend or ("inductor" if device == "cuda" else "aot_eager")
    if args.tensor_parallel > 1 and args.backend is None:
        # Where compiled tensor-parallel code recomputes anything, the partitioner of torch 2.13 mistakes the mesh for a
        # tensor to save, with torch's own checkpointing too.
        backend = "eager"
    plan = make_plan(args, device)
    torch.manual_seed(0)
    model = Model(args.layers, args.dim).to(device)
    parallelize(model, mesh, plan, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + mesh["data"].get_local_rank())  # processes that split products see the same data
    losses: list[float] = []
    for step in range(args.steps):
        tokens = torch.randint(VOCABULARY, (args.batch_size, 1), device=device) + torch.arange(
            args.length, device=device
        )
        tokens %= VOCABULARY
        loss = model(tokens, tokens.roll(-1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if distributed.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    args = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    train(args, device)
    distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    main()
