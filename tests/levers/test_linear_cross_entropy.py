"""linear_cross_entropy: cross_entropy of a linear layer in chunks, with the same loss and gradients."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect._levers.linear_cross_entropy import linear_cross_entropy
from recollect._profile.memory import LiveBytes

ROWS, FEATURES, CLASSES = 12, 6, 11


def make(dtype: torch.dtype = torch.float64, *, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, CLASSES, (3, ROWS // 3), generator=generator)
    targets.view(-1)[:ignored] = -100
    weights = torch.rand(CLASSES, generator=generator, dtype=torch.float64).to(dtype)
    return random(3, ROWS // 3, FEATURES), random(CLASSES, FEATURES), random(CLASSES), targets, weights


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(reduction: str, smoothing: float) -> None:
    for chunks, has_bias, is_weighted, ignored in itertools.product((1, 5, 40), (False, True), (False, True), (0, 7)):
        hidden, weight, bias, targets, classes = make(ignored=ignored)
        given = [hidden, weight, bias] if has_bias else [hidden, weight]
        options: Any = {"reduction": reduction, "label_smoothing": smoothing}
        logits = F.linear(hidden, weight, bias if has_bias else None)
        expected = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), weight=classes if is_weighted else None, **options
        )
        expected = expected.reshape(targets.shape) if reduction == "none" else expected
        found = linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias if has_bias else None,
            class_weight=classes if is_weighted else None,
            chunks=chunks,
            **options,
        )
        torch.testing.assert_close(found, expected)
        upstream = torch.randn_like(expected)
        for one, other in zip(
            torch.autograd.grad(found, given, upstream), torch.autograd.grad(expected, given, upstream), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, _, targets, _ = make()
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, targets, chunks=3)
    assert not found.requires_grad
    torch.testing.assert_close(found, F.cross_entropy(hidden.flatten(0, 1) @ weight.T, targets.flatten()))


def test_backward_may_run_twice_and_adds_up() -> None:
    hidden, weight, _, targets, _ = make()
    loss = linear_cross_entropy(hidden, weight, targets, chunks=3)
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, bias, targets, _ = make()
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, bias=bias).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None


def test_where_no_row_counts_the_mean_is_nan_and_gradients_are_zero() -> None:
    hidden, weight, _, targets, _ = make(ignored=ROWS)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.isnan()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_chunks_are_in_float32_and_gradients_in_the_type_of_what_they_are_for(dtype: torch.dtype) -> None:
    hidden, weight, _, targets, _ = make(dtype)
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, targets, chunks=12)
    (loss * 1024).backward()
    F.cross_entropy(exact[0].flatten(0, 1) @ exact[1].T, targets.flatten()).backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    assert exact[1].grad is not None
    torch.testing.assert_close(weight.grad.double() / 1024, exact[1].grad, rtol=3e-2, atol=3e-3)


def test_under_autocast_products_are_in_its_type() -> None:
    hidden, weight, _, targets, _ = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, targets, chunks=2)
        expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found, expected)
    found.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_all_logits_are_never_there() -> None:
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = torch.randn(2048, 16, requires_grad=True)
    targets = torch.randint(0, 2048, (512,))
    with LiveBytes() as meter:
        recollect.linear_cross_entropy(hidden, weight, targets, chunks=16).backward()
    assert meter.peak_bytes < 512 * 2048 * 4 / 2


def test_wrong_arguments_are_refused() -> None:
    hidden, weight, bias, targets, _ = make()
    with pytest.raises(TypeError, match=r"targets are torch.float64: expected class indices; probabilities are not"):
        linear_cross_entropy(hidden, weight, hidden)
    with pytest.raises(ValueError, match=r"expected hidden \[..., features\] and weight \[classes, features\]"):
        linear_cross_entropy(hidden, weight.T, targets)
    with pytest.raises(ValueError, match="expected one target for each row of hidden"):
        linear_cross_entropy(hidden, weight, targets.flatten())
    with pytest.raises(ValueError, match=r"bias \[3\]: expected one number for each of 11 classes"):
        linear_cross_entropy(hidden, weight, targets, bias=bias[:3])
    with pytest.raises(ValueError, match=r"reduction='max': expected 'mean', 'sum' or 'none'"):
        linear_cross_entropy(hidden, weight, targets, reduction="max")
    with pytest.raises(ValueError, match=r"label_smoothing=2: expected a number from 0 to 1"):
        linear_cross_entropy(hidden, weight, targets, label_smoothing=2)
    with pytest.raises(ValueError, match=r"chunks=0: expected a whole number of at least 1"):
        linear_cross_entropy(hidden, weight, targets, chunks=0)
