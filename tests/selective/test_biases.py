"""A bias that is zero while a region is learned counts as soon as it is not.

Without a dispatch mode torch's `linear` adds it in place, to the product that is kept, and so does its attention.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect

CALLS, WIDTH = 6, 16


class Transposed(nn.Module):
    """Products of inputs that are not contiguous, as batches that come second are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        found: Tensor = x + self.down(self.up(x).tanh())
        return found.transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.out(self.cell(x)[0])
        return found


class Positioned(nn.Module):
    """Attention with a learned bias, which no fused kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.position_bias = nn.Parameter(torch.zeros(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.position_bias.to(q.dtype))
        result: Tensor = x + self.out(found.transpose(1, 2).flatten(2))
        return result


MODULES: dict[str, Callable[[], nn.Module]] = {
    "transposed": Transposed,
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
    "recurrent": Recurrent,
    "positioned": Positioned,
}


def train(kind: str, policy: object, *, first_step: int, autocast: bool) -> list[Tensor]:
    """The gradients of calls, with steps after them from one on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MODULES[kind]() for _ in range(2)))
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
    if policy is not None:
        recollect.apply(model, policy)  # type: ignore[arg-type]
    found: list[Tensor] = []
    for call in range(CALLS):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(call)))
        out.float().square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found += [grad.clone() for grad in grads]
        if call >= first_step:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.3)
    return found


@pytest.mark.parametrize("policy", ["selective", recollect.policies.save_matmuls])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_a_bias_that_was_zero_while_the_region_was_learned_counts(
    kind: str, first_step: int, autocast: bool, policy: object
) -> None:
    found = train(kind, policy, first_step=first_step, autocast=autocast)
    expected = train(kind, None, first_step=first_step, autocast=autocast)
    assert all(map(torch.equal, found, expected))
