"""The models of the benchmarks, each at two sizes for accelerators and two for the CPU, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recollect._bench.models import GPT, Llama, MoE, ResNet, UNet, ViT
from recollect._bench.names import MODELS


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        build: makes the model, on the current device.
        inputs: makes the inputs of a step, on the current device.
        dtype: of the weights.
        autocast: the dtype that the step runs under, if any.
        channels_last: whether weights and images lie that way.
        optimizer: its class.
        options: of the optimizer.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    channels_last: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, device: str) -> tuple[nn.Module, tuple[Tensor, ...], torch.optim.Optimizer]:
        """The model, its inputs and its optimizer on a device."""
        with torch.device(device):
            model = self.build()
            inputs = self.inputs()
        model.to(self.dtype)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            images = 4
            inputs = tuple(one.to(memory_format=torch.channels_last) if one.dim() == images else one for one in inputs)
        return model, inputs, self.optimizer(model.parameters(), **self.options)

    def run_forward(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], kind: str) -> Tensor:
        """The loss, under the autocast of the case for a kind of device."""
        with torch.autocast(kind, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            return call(*inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A model at one size.

    Attributes:
        make: gives the case for a batch and a length; of images the length is a side.
        batch: that it is measured with.
        length: likewise.
        text: its shape in words.
        grows: what may be as large as fits.
    """

    make: Callable[[int, int], Case]
    batch: int
    length: int
    text: str
    grows: tuple[str, ...] = ("batch",)

    def case(self, **sizes: int) -> Case:
        """The case, with other sizes where they are given."""
        return self.make(sizes.get("batch", self.batch), sizes.get("length", self.length))


def _tokens(vocab: int, batch: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocab, (batch, length)), torch.randint(0, vocab, (batch, length)))


def _images(batch: int, side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,)))


def _noise(batch: int, side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side))


def _gpt(shape: tuple[int, int, int], vocab: int, at: tuple[int, int], *, dropout: float = 0.1, **how: Any) -> Scale:
    width, layers, heads = shape

    def make(batch: int, length: int) -> Case:
        return Case(
            build=lambda: GPT(width, layers, heads, length, vocab=vocab, dropout=dropout),
            inputs=_tokens(vocab, batch, length),
            **how,
        )

    text = f"width {width}, {layers} layers"
    return Scale(make=make, batch=at[0], length=at[1], text=text, grows=("batch", "length"))


def _llama(shape: tuple[int, int, int, int, int], vocab: int, at: tuple[int, int], **how: Any) -> Scale:
    width, layers, heads, groups, hidden = shape

    def make(batch: int, length: int) -> Case:
        return Case(
            build=lambda: Llama(width, layers, heads, groups, hidden, length, vocab=vocab),
            inputs=_tokens(vocab, batch, length),
            **how,
        )

    text = f"width {width}, {layers} layers"
    return Scale(make=make, batch=at[0], length=at[1], text=text, grows=("batch", "length"))


def _moe(shape: tuple[int, int, int, int, int], vocab: int, at: tuple[int, int], **how: Any) -> Scale:
    width, layers, heads, hidden, experts = shape

    def make(batch: int, length: int) -> Case:
        return Case(
            build=lambda: MoE(width, layers, heads, hidden, experts, vocab=vocab),
            inputs=_tokens(vocab, batch, length),
            **how,
        )

    text = f"width {width}, {layers} layers, {experts} experts"
    return Scale(make=make, batch=at[0], length=at[1], text=text, grows=("batch", "length"))


def _vit(shape: tuple[int, int, int], at: tuple[int, int], **how: Any) -> Scale:
    def make(batch: int, length: int) -> Case:
        return Case(build=lambda: ViT(*shape, image=length), inputs=_images(batch, length), **how)

    return Scale(make=make, batch=at[0], length=at[1], text=f"width {shape[0]}, {shape[1]} layers")


def _resnet(depths: tuple[int, ...], at: tuple[int, int], **how: Any) -> Scale:
    def make(batch: int, length: int) -> Case:
        sgd = {"lr": 0.1, "momentum": 0.9}
        return Case(
            build=lambda: ResNet(depths),
            inputs=_images(batch, length),
            channels_last=True,
            optimizer=torch.optim.SGD,
            options=sgd,
            **how,
        )

    return Scale(make=make, batch=at[0], length=at[1], text=f"blocks {'-'.join(map(str, depths))}")


def _unet(width: int, at: tuple[int, int], **how: Any) -> Scale:
    def make(batch: int, length: int) -> Case:
        return Case(build=lambda: UNet(width), inputs=_noise(batch, length), **how)

    return Scale(make=make, batch=at[0], length=at[1], text=f"width {width}")


_HALF = torch.bfloat16
_FIFTY = (3, 4, 6, 3)
SCALES: dict[tuple[str, str, str], Scale] = {
    ("cuda", "GPT", "small"): _gpt((768, 12, 12), 50257, (8, 1024), autocast=_HALF),
    ("cuda", "GPT", "large"): _gpt((1024, 24, 16), 50257, (8, 1024), autocast=_HALF),
    ("cuda", "Llama", "small"): _llama((1024, 12, 16, 4, 2816), 32000, (4, 2048), dtype=_HALF),
    ("cuda", "Llama", "large"): _llama((2048, 16, 16, 4, 5632), 32000, (4, 4096), dtype=_HALF),
    ("cuda", "MoE", "small"): _moe((512, 6, 8, 1408, 8), 32000, (8, 1024), dtype=_HALF),
    ("cuda", "MoE", "large"): _moe((1024, 8, 16, 2816, 8), 32000, (8, 2048), dtype=_HALF),
    ("cuda", "ViT", "small"): _vit((384, 12, 6), (128, 224), autocast=_HALF),
    ("cuda", "ViT", "large"): _vit((768, 12, 12), (128, 224), autocast=_HALF),
    ("cuda", "ResNet", "small"): _resnet(_FIFTY, (32, 224), autocast=_HALF),
    ("cuda", "ResNet", "large"): _resnet(_FIFTY, (128, 224), autocast=_HALF),
    ("cuda", "U-Net", "small"): _unet(64, (16, 64), autocast=_HALF),
    ("cuda", "U-Net", "large"): _unet(128, (16, 128), autocast=_HALF),
    ("cpu", "GPT", "small"): _gpt((64, 6, 4), 512, (4, 128), dropout=0.0),
    ("cpu", "GPT", "large"): _gpt((128, 8, 4), 1024, (4, 256), dropout=0.0),
    ("cpu", "Llama", "small"): _llama((64, 6, 4, 2, 176), 512, (4, 128)),
    ("cpu", "Llama", "large"): _llama((128, 8, 4, 2, 352), 1024, (4, 256)),
    ("cpu", "MoE", "small"): _moe((64, 4, 4, 128, 4), 512, (4, 128)),
    ("cpu", "MoE", "large"): _moe((128, 6, 4, 256, 4), 1024, (4, 256)),
    ("cpu", "ViT", "small"): _vit((64, 6, 4), (2, 224)),
    ("cpu", "ViT", "large"): _vit((128, 8, 4), (4, 224)),
    ("cpu", "ResNet", "small"): _resnet((2, 2), (8, 64)),
    ("cpu", "ResNet", "large"): _resnet(_FIFTY, (16, 96)),
    ("cpu", "U-Net", "small"): _unet(32, (1, 64)),
    ("cpu", "U-Net", "large"): _unet(64, (2, 64)),
}
"""By the kind of device, the model and the size."""


def list_cases(kind: str, size: str) -> dict[str, Case]:
    """All models at one size."""
    return {model: SCALES[kind, model, size].case() for model in MODELS}


def llama_8b(tokens: int = 8192, layers: int = 32) -> Llama:
    """Llama 3 8B's shape; build it on ``meta``."""
    return Llama(4096, layers, 32, 8, 14336, tokens, vocab=128256)
