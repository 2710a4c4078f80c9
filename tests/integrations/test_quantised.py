"""Adapters on a frozen base whose weights are quantised, as bitsandbytes does it: gradients to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.integrations.transformers import enable
from tests.integrations.small_models import batch, build

pytest.importorskip("peft")

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


class Product(torch.autograd.Function):
    """A product with a weight that is made from bytes when it is needed, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.weight, ctx.scale = weight, scale  # not saved for backward: it needs no gradient
        return x @ (weight.to(x.dtype) * scale).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] @ (ctx.weight.to(grads[0].dtype) * ctx.scale), None, None


class Bytes(nn.Linear):
    """A linear layer whose weight is frozen bytes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        largest = layer.weight.detach().abs().amax(1, keepdim=True)
        self.register_buffer("scale", largest / 127)
        self.weight = nn.Parameter((layer.weight.detach() / largest * 127).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Product.apply
        product: Tensor = apply(x, self.weight, self.scale)
        return product


def quantise(layer: nn.Linear, kind: str) -> nn.Module:
    if kind == "own":
        return Bytes(layer)
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sizes = (layer.in_features, layer.out_features)
    new: nn.Module = (
        bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        if kind == "nf4"
        else bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
    )
    new.load_state_dict({"weight": layer.weight.detach()})
    return new.to("cpu")  # quantises


def make_model(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build("llama")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, quantise(module, kind))
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def gradients(model: Any, **options: Any) -> list[Tensor]:
    model.zero_grad()
    model(**batch("llama"), **options).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["own", "nf4", "int8"])
def test_adapters_train_on_quantised_weights(kind: str) -> None:
    model = make_model(kind)
    expected = gradients(model, use_cache=False)
    assert len(expected) == 16
    ways: list[dict[str, Any]] = [{}, {"policy": "selective"}, {"budget": "min", "inputs": batch("llama")}]
    for options in ways:
        with enable(model, **options) as handle:
            assert handle.places
            for _ in range(2):
                assert all(map(torch.equal, gradients(model), expected))
