"""Three ways to have a step profiled; none of them needs a line of recollect in the code.

    recollect profile examples/train.py:make_model --optimizer AdamW    a model and its inputs
    recollect profile examples/train.py:make_step                       your own step
    recollect profile examples/train.py -- --batch-size 16              a script, as it is

The first also works dry, for a device that is not here: add `--dry --device H200 --dtype bf16`.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

DIM, CLASSES, TOKENS = 64, 10, 32


class Classifier(nn.Module):
    """A small transformer encoder with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(DIM, nhead=4, dim_feedforward=4 * DIM, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(dim=1))


def make_model(batch: int = 8, length: int = TOKENS) -> tuple[nn.Module, Tensor]:
    """The model and its inputs. What it gives is summed to a loss; a mapping with `loss` would say otherwise.

    `recollect plan --set length=512 --unknown batch` calls it with other sizes.
    """
    return Classifier(), torch.randn(batch, length, DIM)


def make_step(batch_size: int = 8) -> Callable[[], float]:
    """A step with a loss and an optimizer of its own. What is set up here is not part of the profile."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = torch.randn(batch_size, TOKENS, DIM), torch.randint(CLASSES, (batch_size,))

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    step = make_step(args.batch_size)
    for number in range(args.steps):
        print(f"step {number}: loss {step():.4f}")


if __name__ == "__main__":
    main()
