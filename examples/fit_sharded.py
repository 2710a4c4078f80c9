"""A model sharded with FSDP2, within a budget on each process: all processes share one plan.

    torchrun --nproc-per-node 2 examples/fit_sharded.py --budget 70%
    torchrun --nproc-per-node 8 examples/fit_sharded.py --layers 32 --dim 4096 --length 4096 --budget 60GiB

On GPUs it uses NCCL, elsewhere gloo.
"""

import argparse
import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import recollect

VOCABULARY = 256


class Model(nn.Module):
    """Embedding, blocks of attention and MLP, a head; gives logits."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, max(1, dim // 64), 4 * dim, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def lose(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(args: argparse.Namespace, device: str) -> list[float]:
    """Shard, fit, and train; gives the losses of this process."""
    torch.manual_seed(0)
    model = Model(args.layers, args.dim).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + distributed.get_rank())
    tokens = torch.randint(VOCABULARY, (args.batch_size, args.length), device=device)
    batch = (tokens, tokens.roll(-1, dims=1))
    budget = args.budget
    if device == "cpu" and budget.endswith("%"):  # of the plain step: there is no device to take a share of
        plain = recollect.profile(model, tokens, loss=lambda logits: lose(logits, tokens), optimizer=optimizer)
        shares = [plain.peak_bytes * int(budget.removesuffix("%")) // 100]
        distributed.broadcast_object_list(shares)
        budget = shares[0]
    fitted = recollect.fit(model, batch, loss=lose, optimizer=optimizer, budget=budget)
    if distributed.get_rank() == 0:
        print(fitted)

    losses = []
    for step in range(args.steps):
        loss = fitted.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return losses


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--budget", default="70%", help="bytes, or a share of the device; on the CPU, of the plain step"
    )
    return parser.parse_args(words)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    train(parse(), device)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
