"""Lazy logits: a loss takes them in chunks, whatever else happens to them gives what the logits would."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from recollect._levers import lazy_logits
from recollect._levers.lazy_logits import LazyLogits

CLASSES = 7
TARGETS = torch.arange(12).reshape(3, 4) % CLASSES


def make() -> tuple[Tensor, nn.Linear, LazyLogits, Tensor]:
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 4, 5, requires_grad=True), nn.Linear(5, CLASSES)
    return hidden, head, LazyLogits(hidden, head.weight, head.bias, chunks=3), head(hidden)


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "as Transformers does it": lambda x: F.cross_entropy(x.float().view(-1, CLASSES), TARGETS.view(-1)),
    "shifted by slices": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, CLASSES), TARGETS[..., 1:].reshape(-1)
    ),
    "rows cut off": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, x.size(-1)), TARGETS[:, 1:].flatten()),
    "flattened": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), TARGETS.flatten()),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS),
    "classes second by permute": lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGETS, reduction="sum"),
    "one example": lambda x: F.cross_entropy(x[0], TARGETS[0], reduction="none").sum(),
    "weights and an ignored class": lambda x: F.cross_entropy(
        x.reshape(12, -1), TARGETS.flatten(), weight=torch.arange(1.0, CLASSES + 1), ignore_index=2
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_is_computed_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, lazy, logits = make()
    expected = LOSSES[name](logits)
    wanted = torch.autograd.grad(expected, [hidden, head.weight, head.bias])
    monkeypatch.setattr(LazyLogits, "compute", lambda self: pytest.fail("the logits were computed"))
    found = LOSSES[name](lazy)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, [hidden, head.weight, head.bias]), wanted, strict=True):
        torch.testing.assert_close(one, other)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda x: torch.softmax(x, -1),
    "a method": lambda x: x.argmax(-1),
    "an operator": lambda x: x * 2 + 1,
    "a reflected operator": lambda x: 1 - x,
    "a comparison": lambda x: x > 0,
    "some classes": lambda x: x[..., :3],
    "a mask": lambda x: x[x > 0],
    "a new dimension": lambda x: x[:, None],
    "in a list": lambda x: torch.stack([x, x]),
    "another shape": lambda x: x.view(4, -1),
    "all in one": lambda x: x.flatten(),
    "other dimensions": lambda x: x.transpose(0, 1),
    "another order": lambda x: x.permute(2, 0, 1),
    "moved and back": lambda x: x.transpose(1, 2).transpose(1, 2).exp(),
    "classes second": lambda x: x.transpose(1, 2).exp(),
    "soft targets": lambda x: F.cross_entropy(x[0], torch.full((4, CLASSES), 1 / CLASSES)),
    "iteration": lambda x: next(iter(x)),
    "a loss of another kind": lambda x: F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), TARGETS.flatten()),
    "another type": lambda x: x.to(torch.float64).sum(),
    "softly capped": lambda x: F.cross_entropy((torch.tanh(x / 3) * 3).view(-1, CLASSES), TARGETS.view(-1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_else_is_done_gives_what_the_logits_would(name: str) -> None:
    hidden, _, lazy, logits = make()
    expected, found = OTHERS[name](logits), OTHERS[name](lazy)
    torch.testing.assert_close(found, expected)
    if expected.requires_grad:
        for one, other in zip(
            torch.autograd.grad(found.sum(), hidden), torch.autograd.grad(expected.sum(), hidden), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_it_looks_like_the_logits() -> None:
    _, _, lazy, logits = make()
    for read in (
        lambda x: x.shape,
        lambda x: x.dtype,
        lambda x: x.device,
        lambda x: x.ndim,
        lambda x: x.dim(),
        lambda x: x.size(),
        lambda x: x.size(-1),
        lambda x: x.numel(),
        lambda x: len(x),
        lambda x: x.requires_grad,
        lambda x: x.transpose(1, 2).shape,
        lambda x: x.float().dtype,
        lambda x: x.to("cpu").shape,
    ):
        assert read(lazy) == read(logits)
    assert repr(lazy) == "LazyLogits([3, 4, 7], dtype=torch.float32, device='cpu')"


def test_logits_that_were_looked_at_without_gradients_still_have_them_later() -> None:
    _, _, lazy, _ = make()
    with torch.no_grad():
        assert (lazy.argmax(-1) >= 0).all()
    assert lazy.exp().requires_grad


def test_the_loss_has_the_type_that_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(4, 5, dtype=torch.bfloat16), torch.randn(CLASSES, 5, dtype=torch.bfloat16)
    logits = hidden @ weight.T
    lazy: Any = LazyLogits(hidden, weight)
    assert F.cross_entropy(lazy, TARGETS[0]).dtype == F.cross_entropy(logits, TARGETS[0]).dtype
    assert F.cross_entropy(lazy.float(), TARGETS[0]).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        made: Any = LazyLogits(hidden.float(), weight.float())
        assert made.dtype == torch.bfloat16
        assert F.cross_entropy(made, TARGETS[0]).dtype == torch.float32
    monkeypatch.setattr(lazy_logits, "linear_cross_entropy", lambda *_, **__: pytest.fail("computed in chunks"))
    F.cross_entropy(lazy, torch.full((4, CLASSES), 1 / CLASSES, dtype=torch.bfloat16))
