"""A region that keeps everything is a plain call: it holds what autograd holds, from the first step on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect import Decision, policies
from recollect._profile.memory import LiveBytes


class Attention(nn.Module):
    """With dropout, so that its math form runs on the CPU: many operators, of which autograd saves some."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        result: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2)).tanh()
        return result


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(3)))


def step(layers: nn.Module) -> tuple[int, list[Tensor]]:
    """The peak of a step, and its gradients."""
    layers.zero_grad()
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 2 * 16 * 32).reshape(2, 16, 32)
    with LiveBytes(include=layers) as meter:
        layers(x).square().mean().backward()
    return meter.peak_bytes, [p.grad for p in layers.parameters() if p.grad is not None]


KEEPING_ALL = {
    "save_all": policies.save_all,
    "Decision.SAVE": Decision.SAVE,
    "per region": policies.per_region({"*": policies.save_all}),
}


@pytest.mark.parametrize("policy", KEEPING_ALL.values(), ids=KEEPING_ALL)
def test_what_keeps_everything_holds_what_plain_holds_from_the_first_step_on(policy: Any) -> None:
    peak, expected = step(model())
    layers = model()
    recollect.apply(layers, {"*": policy})
    for _ in range(3):
        found, gradients = step(layers)
        assert found == peak
        assert all(map(torch.equal, gradients, expected))


def test_nothing_runs_again() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(recollect.is_recomputing())
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    recollect.checkpoint(function, policy=policies.save_all)(x).sum().backward()
    assert calls == [False]


def test_it_is_explained_by_its_operators() -> None:
    block = Attention()
    region = recollect.checkpoint(block, policy=policies.save_all)
    for _ in range(2):
        region(torch.ones(1, 4, 32)).sum().backward()
    text = str(recollect.explain(region))
    assert text.startswith("region 'Attention' under save_all, called 2 times\n")
    assert "nothing is recomputed: autograd holds what it would hold without the region" in text
    assert "aten.tanh.default" in text


def test_a_region_around_it_forgets_what_it_keeps() -> None:
    block = Attention()

    def outer(x: Tensor) -> Tensor:
        result: Tensor = recollect.checkpoint(block, policy=policies.save_all)(x)
        return result

    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = recollect.checkpoint(outer)(torch.ones(1, 4, 32)).sum()
    loss.backward()
    assert len(saved) <= 1
