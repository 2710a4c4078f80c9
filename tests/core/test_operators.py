"""Facts about operators."""

import pytest
import torch

from recollect._core.operators import count_flops, operator_of

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention_costs_the_same_however_many_heads_share_keys(heads: int) -> None:
    query, key = torch.empty(2, 8, 16, 32), torch.empty(2, heads, 16, 32)
    product = 2 * 2 * 8 * 16 * 16 * 32
    assert count_flops(operator_of(ATTENTION), (query, key, key), {}, (query,)) == 2 * product
    assert count_flops(operator_of(GRADIENT), (query, query, key, key, query), {}, (query, key, key)) == 5 * product


def test_what_has_no_formula_costs_nothing() -> None:
    x = torch.ones(2)
    assert count_flops(operator_of(torch.ops.aten.sin.default), (x,), {}, x) == 0
