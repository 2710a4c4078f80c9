"""A GPT that learns additions in seconds on a CPU: what the demo trains."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect._core.authors import Role
from recollect._profile.memory import LiveBytes

__recollect_role__ = Role.PROGRAM

STEPS, BATCH, TOKENS = 12, 2, 512
DIM, HEADS, LAYERS, DROPOUT = 128, 4, 4, 0.1
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
class Training:
    """What one training showed.

    Attributes:
        losses: of each step.
        gradients: of the last.
        step_s: processor time of the quickest step: unlike the clock, it does not count what else the machine does.
        peak_bytes: of activations and gradients.
        model: the model that was trained.
        optimizer: the optimizer that trained it.
        batch: of the last step.
    """

    losses: list[float]
    gradients: list[Tensor]
    step_s: float
    peak_bytes: int
    model: GPT
    optimizer: torch.optim.Optimizer
    batch: Tensor


def use_one_thread() -> None:
    """Keep torch to one thread: the tensors are small, and on a busy machine threads mostly wait for each other.

    Measured for the whole demo on two busy cores: 43 s with one thread, not done after 200 s with two.
    """
    torch.set_num_threads(1)


def count_steps() -> int:
    """How many steps one training has; the last is for the meter of memory, and not timed."""
    return STEPS + 1


def train(rules: Mapping[str, Any], after_step: Callable[[int], None] = lambda done: None) -> dict[str, Training]:
    """Train one new model for each of the rules, all from the same start, step by step in turns.

    Whatever else the machine does meanwhile then disturbs them all, and their times can be compared.

    Args:
        rules: for `recollect.apply`, by name; None to leave a model as it is.
        after_step: called after each step with the number of steps so far.
    """
    trainings = {name: _Training(given) for name, given in rules.items()}
    data, done = make_batches(), 0
    for batch in data:
        for training in trainings.values():
            training.step(batch)
            after_step(done := done + 1)
    runs = {}
    for name, training in trainings.items():
        runs[name] = training.finish(data[0])
        after_step(done := done + 1)
    return runs


class _Training:
    """A model in training."""

    def __init__(self, rules: Any) -> None:
        torch.manual_seed(0)
        self.model = GPT()
        if rules is not None:
            recollect.apply(self.model, rules)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.get_rng_state()  # each has dropout of its own, and all have the same
        self.losses: list[float] = []
        self.times_s: list[float] = []

    def step(self, batch: Tensor) -> None:
        """Train on a batch."""
        self._run(batch)
        self.optimizer.step()

    def finish(self, batch: Tensor) -> Training:
        """One more step: the meter slows it down, so it is not timed."""
        with LiveBytes() as meter:
            self._run(batch)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return Training(
            losses=self.losses,
            gradients=gradients,
            step_s=min(self.times_s[:-1]),
            peak_bytes=meter.peak_bytes,
            model=self.model,
            optimizer=self.optimizer,
            batch=batch,
        )

    def _run(self, batch: Tensor) -> None:
        torch.set_rng_state(self.generator)
        self.optimizer.zero_grad()
        start = time.process_time()
        loss = find_loss(self.model(batch[:, :-1]), batch)
        loss.backward()
        self.times_s.append(time.process_time() - start)
        self.losses.append(loss.item())
        self.generator = torch.get_rng_state()
