"""A training loop within a memory budget: one call before the loop, nothing else changes.

    python examples/fit_budget.py                   70% of what the plain step takes
    python examples/fit_budget.py --budget 40MiB    any size; on a GPU also a share of it, such as 90%

Needs `pip install "recollect[plan]"`. Prints what the plan promises, what was measured, and the losses, which equal
those of the plain loop to the last bit.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import recollect

VOCABULARY, STEPS = 64, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    """Embedding, blocks of attention and MLP, a head; gives logits."""

    def __init__(self, layers: int = 6, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def find_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(budget: str | int | None) -> list[float]:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(VOCABULARY, (8, 129), device=DEVICE)
    batch = (tokens[:, :-1], tokens[:, 1:])
    if budget is not None:
        print(recollect.fit(model, batch, loss=find_loss, optimizer=optimizer, budget=budget))
    losses = []
    for _ in range(STEPS):
        inputs, targets = batch
        loss = find_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def find_plain_peak() -> int:
    """The peak of a plain step with its optimizer, from shapes alone."""
    model, tokens = Model().to(DEVICE), torch.zeros(8, 128, dtype=torch.long, device=DEVICE)
    return recollect.profile(model, tokens, dry=True, optimizer=torch.optim.AdamW).peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", help="the most memory that a step may use: 40MiB, 90%% (of a GPU), min")
    budget = parser.parse_args().budget or find_plain_peak() * 7 // 10
    plain, fitted = train(None), train(budget)
    print("losses:", " ".join(f"{loss:.4f}" for loss in fitted), "equal" if plain == fitted else "DIFFERENT")


if __name__ == "__main__":
    main()
