"""Torch's multi-head attention in a region under a policy: one call of torch, of which the parts count."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import policies

TOKENS, SIZE = 6, 8
MASK = nn.Transformer.generate_square_subsequent_mask(TOKENS)


def make(*, batch_first: bool = True) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(SIZE, 2, 4 * SIZE, dropout=0.1, batch_first=batch_first)


def gradients(fn: Any, layer: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(fn(x, **options).square().sum(), [x, *layer.parameters()]))


@pytest.mark.parametrize(
    "options", [{}, {"src_mask": MASK}, {"src_mask": MASK, "is_causal": True}], ids=["no mask", "mask", "causal"]
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_is_replayed_from_its_products(batch_first: bool, options: dict[str, Any]) -> None:
    layer = make(batch_first=batch_first)
    region = recollect.checkpoint(layer, policy="selective")
    for _ in range(3):
        shape = (2, TOKENS, SIZE) if batch_first else (TOKENS, 2, SIZE)
        x = torch.randn(shape, requires_grad=True)
        expected = gradients(layer, layer, x, **options)
        assert all(map(torch.equal, gradients(region, layer, x, **options), expected))
    assert str(recollect.explain(region)).splitlines()[-1].startswith("recomputed by replaying")


def test_kept_products_are_not_repeated() -> None:
    layer, x = make(), torch.randn(2, TOKENS, SIZE, requires_grad=True)
    region = recollect.checkpoint(layer, policy=policies.save_matmuls)
    counts = []
    for fn in (layer, region, region, region):
        loss = fn(x).square().sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        counts.append(counter.get_flop_counts()["Global"].get(torch.ops.aten.mm, 0))
    assert counts[-1] == counts[0]


def test_weights_of_attention_that_are_asked_for() -> None:
    attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def fn(x: Tensor) -> Tensor:
        mixed, weights = attention(x.sin(), x.sin(), x.sin(), need_weights=True)
        found: Tensor = mixed.exp() * weights.sum()
        return found

    region = recollect.checkpoint(fn, policy=policies.save_matmuls)
    for _ in range(3):
        x = torch.randn(2, TOKENS, SIZE, requires_grad=True)
        expected = gradients(fn, attention, x)
        assert all(map(torch.equal, gradients(region, attention, x), expected))


def test_an_error_inside_that_the_function_catches() -> None:
    attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def fn(x: Tensor) -> Tensor:
        with contextlib.suppress(AssertionError, RuntimeError):
            attention(x, x[:, :2], x)
        found: Tensor = attention(x, x, x, need_weights=False)[0]
        return found.exp()

    region = recollect.checkpoint(fn, policy=policies.save_matmuls)
    for _ in range(3):
        x = torch.randn(2, TOKENS, SIZE, requires_grad=True)
        expected = gradients(fn, attention, x)
        assert all(map(torch.equal, gradients(region, attention, x), expected))
