"""A training step of the model, run in different ways: its time against the floor, its memory, its gradients.

The floor is a plain step and one plain forward: what recomputing everything costs with an engine that costs nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from cases import Setting
from llama_like import Layers, LlamaLike, one_by_one
from torch import Tensor, nn

from recollect._bench.alternate import Step, Timing
from recollect._bench.rivals import Call
from recollect._profile.memory import LiveBytes

PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    dim: int
    layers: int
    tokens: int
    batch: int = 4
    vocab: int = 32000
    dropout: float = 0.0

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return f"d{self.dim} L{self.layers} T{self.tokens} B{self.batch}{dropout}"

    def build(self, device: torch.device, dtype: torch.dtype) -> tuple[LlamaLike, Tensor]:
        torch.manual_seed(0)
        model = LlamaLike(self.dim, self.layers, self.tokens, vocab=self.vocab, dropout=self.dropout)
        model.to(device, dtype)
        for parameter in model.parameters():  # allocated once, so that peaks are above parameters and gradients
            parameter.grad = torch.zeros_like(parameter)
        return model, torch.randint(self.vocab, (self.batch, self.tokens), device=device)


SMALL = Model(dim=128, layers=6, tokens=64, batch=2, vocab=256)
LAUNCH = Model(dim=1024, layers=24, tokens=1024)
COMPUTE = Model(dim=2048, layers=16, tokens=4096)


def each_block(call: Call) -> Layers:
    """One region per block."""

    def run(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in layers:
            x = call(layer, x, cos, sin)
        return x

    return run


def train(model: LlamaLike, ids: Tensor, run: Layers) -> None:
    model.zero_grad(set_to_none=False)
    torch.autograd.backward(model(ids, run))


def gradients(model: LlamaLike, ids: Tensor, run: Layers) -> list[Tensor]:
    torch.manual_seed(1)
    train(model, ids, run)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def gradient_differences(model: LlamaLike, ids: Tensor, runs: Mapping[str, Layers]) -> dict[str, float]:
    """The largest difference of any gradient from the plain step's, for each way of running the blocks."""
    expected = gradients(model, ids, one_by_one)
    return {label: _largest_difference(gradients(model, ids, run), expected) for label, run in runs.items()}


def _largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What each way of running the blocks took.

    Attributes:
        timings: by label, "plain" among them.
        floor: a plain step and one plain forward.
        peak_bytes: the allocator's, above parameters and gradients; None on a CPU.
        gradient_differences: from the plain step.
    """

    timings: dict[str, Timing]
    floor: Timing
    peak_bytes: dict[str, int | None]
    gradient_differences: dict[str, float]


def measure(model: LlamaLike, ids: Tensor, runs: Mapping[str, Layers], setting: Setting) -> Measured:
    """Time a step of each, taking turns with the plain step and the plain forward."""
    everyone = {PLAIN: one_by_one, **runs}
    differences = gradient_differences(model, ids, everyone)
    on_accelerator = setting.device.type != "cpu"
    held_bytes = torch.accelerator.memory_allocated(setting.device) if on_accelerator else 0
    steps: dict[str, Step] = {label: partial(train, model, ids, run) for label, run in everyone.items()}
    timings = setting.alternate({"forward": partial(model, ids), **steps})
    peaks = {label: timings[label].peak_bytes for label in everyone}
    return Measured(
        timings={label: timings[label] for label in everyone},
        floor=timings[PLAIN].plus(timings["forward"]),
        peak_bytes={label: None if peak is None else peak - held_bytes for label, peak in peaks.items()},
        gradient_differences=differences,
    )


def live_bytes(model: LlamaLike, ids: Tensor, run: Layers) -> tuple[int, int]:
    """Bytes held between forward and backward, and at the peak, above parameters and gradients."""
    train(model, ids, run)  # whatever an engine sets up once is not the step's
    model.zero_grad(set_to_none=False)
    with LiveBytes() as meter:
        loss = model(ids, run)
        held_bytes = meter.live_bytes
        torch.autograd.backward(loss)
    return held_bytes, meter.peak_bytes
