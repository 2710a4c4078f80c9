"""A GPT that learns additions in seconds on a CPU: what the demo trains."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect._core.authors import Role
from recollect._profile.memory import LiveBytes

__recollect_role__ = Role.PROGRAM

STEPS, BATCH, TOKENS = 16, 16, 128
DIM, HEADS, LAYERS, DROPOUT = 128, 4, 5, 0.1
ALPHABET = "0123456789+=; "


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and with a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(DROPOUT))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens, then each token's features."""
        x = x + self.attend(self.norm1(x))
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed

    def attend(self, x: Tensor) -> Tensor:
        """Let each token look at those before it."""
        heads = self.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(len(ALPHABET), DIM), nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, len(ALPHABET))

    def forward(self, ids: Tensor) -> Tensor:
        """A score for each character, for each token."""
        x = self.embed(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def write_sums(length: int) -> str:
    """Text to learn from: additions.

    >>> write_sums(12)
    '49+97=146; 5'
    """
    rng = random.Random(0)
    pairs = ((rng.randrange(100), rng.randrange(100)) for _ in range(length))
    return "".join(f"{a}+{b}={a + b}; " for a, b in pairs)[:length]


def make_batches() -> list[Tensor]:
    """One batch for each step, of `TOKENS` characters and the one that follows."""
    characters = STEPS * BATCH * (TOKENS + 1)
    ids = torch.tensor([ALPHABET.index(character) for character in write_sums(characters)])
    return list(ids.view(STEPS, BATCH, TOKENS + 1))


def find_loss(scores: Tensor, batch: Tensor) -> Tensor:
    """How wrong the scores are about the next characters of a batch."""
    return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training showed.

    Attributes:
        losses: of each step.
        gradients: of the last.
        step_s: how long a step takes, the middle one of all.
        peak_bytes: of activations and gradients.
        model: that was trained.
        optimizer: that trained it.
        batch: of the last step.
    """

    losses: list[float]
    gradients: list[Tensor]
    step_s: float
    peak_bytes: int
    model: GPT
    optimizer: torch.optim.Optimizer
    batch: Tensor


def train(rules: Any, after_step: Callable[[], None] = lambda: None) -> Run:
    """Train a new model from the same start.

    Args:
        rules: for `recollect.apply`; None to leave the model as it is.
        after_step: called after each step.
    """
    torch.manual_seed(0)
    model = GPT()
    if rules is not None:
        recollect.apply(model, rules)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = find_loss(model(batch[:, :-1]), batch)
        loss.backward()
        return loss.item()

    data = make_batches()
    losses, times_s = [], []
    for batch in data:
        start = time.perf_counter()
        losses.append(step(batch))
        times_s.append(time.perf_counter() - start)
        optimizer.step()
        after_step()

    with LiveBytes() as meter:  # one more step: the meter slows it down, so it is not timed
        losses.append(step(data[0]))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Run(
        losses=losses,
        gradients=gradients,
        step_s=statistics.median(times_s),
        peak_bytes=meter.peak_bytes,
        model=model,
        optimizer=optimizer,
        batch=data[0],
    )
