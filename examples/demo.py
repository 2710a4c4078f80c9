"""Trains a small GPT plain, with `recollect.apply` to its blocks, and under a policy, and compares the three.

    python examples/demo.py

The checkpointed model forgets what happens inside a block during forward and computes it again during backward, dropout
masks included: less memory, more time, and bit for bit the same training. The policy keeps what is dear to compute, the
products and attention: some of the memory for some of the time.
"""

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect import policies
from recollect._profile.memory import LiveBytes

STEPS, BATCH, TOKENS = 16, 16, 128
DIM, HEADS, LAYERS, DROPOUT = 128, 4, 5, 0.1
ALPHABET = "0123456789+=; "
DEAR = policies.first_match(policies.save_matmuls, policies.save_attention)

RULES: dict[str, Any] = {"plain": None, "recollect": "full", "with policy": DEAR}
"""What is applied to the model, which knows nothing of it; its blocks are found."""


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and with a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(DROPOUT))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(len(ALPHABET), DIM), nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, len(ALPHABET))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sums(length: int) -> str:
    """Text to learn from: additions such as `12+7=19; `."""
    rng = random.Random(0)
    pairs = ((rng.randrange(100), rng.randrange(100)) for _ in range(length))
    return "".join(f"{a}+{b}={a + b}; " for a, b in pairs)[:length]


def batches() -> list[Tensor]:
    """One batch for each step, of `TOKENS` characters and the one that follows."""
    characters = STEPS * BATCH * (TOKENS + 1)
    ids = torch.tensor([ALPHABET.index(character) for character in sums(characters)])
    return list(ids.view(STEPS, BATCH, TOKENS + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training showed."""

    losses: list[float]
    gradients: list[Tensor]
    step_s: float
    peak_bytes: int


def train(rules: Any) -> Run:
    torch.manual_seed(0)
    model = GPT()
    if rules is not None:
        recollect.apply(model, rules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        return loss.item()

    data = batches()
    losses, times_s = [], []
    for batch in data:
        start = time.perf_counter()
        losses.append(step(batch))
        times_s.append(time.perf_counter() - start)
        optimizer.step()

    with LiveBytes() as meter:  # one more step: the meter slows it down, so it is not timed
        losses.append(step(data[0]))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Run(losses=losses, gradients=gradients, step_s=statistics.median(times_s), peak_bytes=meter.peak_bytes)


def main() -> None:
    runs = {name: train(rules) for name, rules in RULES.items()}
    plain, *others = runs.values()

    table = Table(title=f"GPT of {LAYERS} blocks, {STEPS} training steps", title_justify="left")
    for column in ("", "step time", "peak live bytes", "first loss", "last loss", "gradient difference"):
        table.add_column(column, justify="right" if column else "left")
    for name, run in runs.items():
        difference = max((a - b).abs().max().item() for a, b in zip(plain.gradients, run.gradients, strict=True))
        table.add_row(
            name,
            f"{run.step_s * 1e3:.0f} ms",
            f"{run.peak_bytes / 2**20:.1f} MiB",
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            "" if run is plain else f"{difference:g}",
        )
    console = Console()
    console.print(table)
    for name, run in list(runs.items())[1:]:
        memory, duration = run.peak_bytes / plain.peak_bytes, run.step_s / plain.step_s
        console.print(f"{name}: {1 - memory:.0%} less memory for {duration - 1:.0%} more time")
    equal = all(run.losses == plain.losses for run in others)
    console.print(f"All {len(plain.losses)} losses are {'equal' if equal else 'NOT equal'}.")
    console.print("Peak live bytes: activations and gradients of one step, without parameters and optimiser state.")


if __name__ == "__main__":
    main()
