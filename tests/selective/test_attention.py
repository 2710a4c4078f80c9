"""torch's attention makes calls of torch itself: a policy keeps single ones of them, and the region is replayed."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import policies
from recollect._core.torch_private.ambient import function_mode_depth
from tests.selective.comparing import assert_like_plain

WIDTH, LENGTH = 8, 6


class Attending(nn.Module):
    """Attention under several options."""

    def __init__(self, *, masks: bool = False, **options: Any) -> None:
        super().__init__()
        self.needs_weights = options.pop("needs_weights", False)
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        other = x.sin() if self.inner.kdim == WIDTH else x.sin()[..., : self.inner.kdim]
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if self.masks else None
        mixed, weights = self.inner(
            x, other, other[..., : self.inner.vdim], need_weights=self.needs_weights, attn_mask=mask
        )
        found: Tensor = (mixed.exp() + x) if weights is None else mixed.exp() * weights.sum()
        return found


OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "weights": {"needs_weights": True},
    "mask": {"masks": True},
    "other widths": {"kdim": 4, "vdim": 2},
    "dropout": {"dropout": 0.3},
    "without bias": {"bias": False, "add_zero_attn": True},
}
POLICIES = {
    "attention": policies.save_attention,
    "products": policies.save_ops("aten.mm.default", "aten.addmm.default", "aten.bmm.default"),
}
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")


def tokens() -> tuple[Tensor]:
    return (torch.randn(2, LENGTH, WIDTH, requires_grad=True),)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_the_plain_ones(options: dict[str, Any], policy: str) -> None:
    model = Attending(**options)
    assert_like_plain(model, POLICIES[policy], tokens, module=model)


def test_of_an_encoder_layer_single_products_are_kept() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, norm_first=True)
    flops = {}
    for kept in (("aten.gelu.default", "aten.relu.default"), ("aten.addmm.default", "aten.mm.default")):
        region = recollect.checkpoint(layer, policy=policies.save_ops(*kept))
        for _ in range(3):
            loss = region(*tokens()).square().sum()
            with FlopCounterMode(display=False) as counter:
                loss.backward()
        flops[kept] = counter.get_total_flops()
        assert "recomputed by replaying" in " ".join(str(recollect.explain(region)).split())
    with_products, without = sorted(flops.values())
    projections = 2 * (2 * LENGTH) * WIDTH * 3 * WIDTH  # of queries, keys and values
    assert without - with_products >= projections


def test_an_error_inside_leaves_no_mode_behind() -> None:
    def fn(x: Tensor) -> Tensor:
        weights = torch.randn(3 * WIDTH, WIDTH), torch.randn(3 * WIDTH)
        return functional.multi_head_attention_forward(
            x, x, x, WIDTH, 3, *weights, None, None, False, 0.0, torch.randn(WIDTH, WIDTH), None
        )[0]

    region = recollect.checkpoint(fn, policy=policies.save_attention)
    for _ in range(2):
        with pytest.raises(AssertionError, match="not divisible"):
            region(*tokens())
        assert function_mode_depth() == 0


def test_an_error_inside_that_the_function_catches() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def fn(x: Tensor) -> Tensor:
        with suppress(AssertionError, RuntimeError):
            attention(x, x[:, :2], x)
        found: Tensor = attention(x, x, x, need_weights=False)[0]
        return found.exp()

    assert_like_plain(fn, policies.save_matmuls, tokens, module=attention)


MASK = nn.Transformer.generate_square_subsequent_mask(LENGTH)


@pytest.mark.parametrize("options", [{}, {"src_mask": MASK, "is_causal": True}], ids=["no mask", "causal"])
@pytest.mark.parametrize("batch_first", [True, False])  # of which one makes inputs with gaps, which are copied
def test_an_encoder_layer_is_replayed_from_some_of_its_products(batch_first: bool, options: dict[str, Any]) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=batch_first)
    region = recollect.checkpoint(layer, policy="selective")
    for _ in range(3):
        x = torch.randn((2, LENGTH, WIDTH) if batch_first else (LENGTH, 2, WIDTH), requires_grad=True)
        found = []
        for fn in (layer, region):
            torch.manual_seed(1)
            found.append(torch.autograd.grad(fn(x, **options).square().sum(), [x, *layer.parameters()]))
        assert all(map(torch.equal, *found))
    assert str(recollect.explain(region)).splitlines()[-1].startswith("recomputed by replaying")
