"""`recollect.apply` on timm's own models: its blocks without rules, gradients to the bit, a peak like its switch's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import recollect

try:
    import timm
except (ImportError, RuntimeError):  # timm needs torchvision, whose wheel may be for another torch
    pytest.skip("timm cannot be imported", allow_module_level=True)

# What timm warns about is its own.
pytestmark = pytest.mark.filterwarnings("ignore")

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 3},
    "convnext_atto": {},
    "resnet18": {},
    "efficientnet_b0": {},
}


def make(name: str, batch: int = 2) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    options = MODELS[name]
    side = options.get("img_size", 64)
    return timm.create_model(name, num_classes=10, **options).train(), torch.randn(batch, 3, side, side)


def trained(model: Any, x: Tensor) -> list[Tensor]:
    """The gradients of a step, and the buffers after it."""
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", [None, "selective"])
def test_models_of_timm_train_as_without_regions(name: str, policy: str | None) -> None:
    plain, x = make(name)
    model, _ = make(name)
    with recollect.apply(model, policy=policy):
        for _ in range(3):
            assert all(map(torch.equal, trained(model, x), trained(plain, x)))


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_no_higher_than_with_the_switch_of_timm(name: str) -> None:
    model, x = make(name, batch=16)  # enough that activations are the largest part
    plain = recollect.profile(model, x, timed=False).peak_bytes
    with recollect.apply(model):
        ours = recollect.profile(model, x, timed=False).peak_bytes
    model.set_grad_checkpointing()
    assert ours <= 1.01 * recollect.profile(model, x, timed=False).peak_bytes
    assert ours < plain
