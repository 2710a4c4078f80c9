"""Which operators are one call of torch: what the model's code calls once is one, however many operators that runs."""

import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.norm(x)) + x.sin()
        mixed: Tensor = self.attention(y, y, y, need_weights=False)[0]
        return y + mixed


def test_operators_of_one_call_of_torch_share_a_number() -> None:
    seen = recollect.profile(Net(), torch.randn(2, 4, 8))
    numbers: dict[str, set[int | None]] = {}
    for call in seen.calls[: seen.forward_count]:
        numbers.setdefault(call.module, set()).add(call.within)
    assert len(numbers["norm"]) == 1
    assert sum(call.module == "norm" for call in seen.calls[: seen.forward_count]) > 1


def test_calls_that_attention_makes_have_numbers_of_their_own() -> None:
    seen = recollect.profile(Net(), torch.randn(2, 4, 8))
    inside = {call.op: call.within for call in seen.calls[: seen.forward_count] if call.module == "attention"}
    products = [within for op, within in inside.items() if "mm" in op or "scaled_dot_product" in op]
    assert len(products) > 1
    assert len(set(products)) == len(products)


def test_calls_on_one_line_have_numbers_of_their_own() -> None:
    seen = recollect.profile(Net(), torch.randn(2, 4, 8))
    own = {call.op: call.within for call in seen.calls[: seen.forward_count] if not call.module}
    assert own["aten.silu.default"] != own["aten.sin.default"]
    assert all(call.within is None for call in seen.calls[seen.forward_count :])


def test_two_calls_of_a_module_in_a_row_are_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.block(self.block(x)).sin())
            return found

    seen = recollect.profile(Twice(), torch.randn(2, 8))
    entered = [(call.module, call.entered) for call in seen.calls if call.entered is not None]
    assert entered == [("block.0", "block")]
    assert recollect.Profile.from_json(seen.to_json()) == seen


def test_what_is_counted_out_of_a_choice_counts_as_routing() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _, chosen = x.topk(2)
            return x.gather(-1, chosen * 0 + chosen.flip(-1)).sum()

    seen = recollect.profile(Router(), torch.randn(4, 8, requires_grad=True))
    routing = {call.op for call in seen.calls if call.is_routing}
    assert {"aten.topk.default", "aten.mul.Tensor", "aten.add.Tensor"} <= routing
    assert "aten.gather.default" not in routing
