"""Cross entropy of a linear layer's output, a few rows at a time: the logits never exist all at once.

A chunk's logits are made, turned into their own gradient in place, multiplied into the gradients of the hidden states
and of the weight, and forgotten. Where one number is returned that happens in forward, so that nothing is computed
twice: backward only scales. Losses row by row (``reduction="none"``) get their factors in backward, where logits are
made once more, as they are if backward runs a second time. Sums over chunks are in float32, or float64 for float64.
After Hsu et al., Liger Kernel (2024), and Wijmans et al., Cut Your Losses (2024), without their kernels: these are
calls of torch, on any device.

Not done: targets as probabilities, gradients of gradients, `torch.func`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from recollect._core.argument_text import short_repr
from recollect._core.patterns import hint_nearest

REDUCTIONS = ("mean", "sum", "none")
_LEAST_ROWS_HOST, _LEAST_ROWS_DEVICE = 64, 512


def linear_cross_entropy(  # noqa: PLR0913 (those of cross_entropy)
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunks: int | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias`` without ever holding all of its logits.

    Equal to ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)``, up to rounding. Forward already
    computes the gradients, so the time of backward moves there; gradients of gradients are not available.

    Args:
        hidden: the input of the last layer, ``[..., features]``.
        weight: the last layer's weight, ``[classes, features]``.
        targets: class indices, of the shape of `hidden` without its last dimension.
        bias: the last layer's bias.
        class_weight: as `weight` of ``cross_entropy``.
        ignore_index: rows with this target do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: as of ``cross_entropy``.
        chunks: how many parts to cut the rows into; by default so many that the logits of a part are as large as
            `hidden`.

    Returns:
        The loss in float32, or in float64 for float64.

    Raises:
        ValueError: shapes do not match, or an option has an invalid value.
        TypeError: the targets are not class indices.

    >>> import torch, recollect
    >>> hidden, targets = torch.randn(32, 16, requires_grad=True), torch.randint(0, 1000, (32,))
    >>> head = torch.nn.Linear(16, 1000)
    >>> loss = recollect.linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, chunks=4)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(head(hidden), targets))
    True
    >>> loss.backward()
    """
    _check(hidden, weight, targets, bias, class_weight)
    if reduction not in REDUCTIONS:
        message = f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'{hint_nearest(reduction, REDUCTIONS)}"
        raise ValueError(message)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        message = f"ignore_index={short_repr(ignore_index)}: expected a whole number"
        raise TypeError(message)
    if not 0.0 <= label_smoothing <= 1.0:
        message = f"label_smoothing={label_smoothing!r}: expected a number from 0 to 1"
        raise ValueError(message)
    rows = targets.numel()
    cut = choose_chunks(rows, weight.shape[0], weight.shape[1], hidden.device) if chunks is None else chunks
    if cut < 1:
        message = f"chunks={chunks!r}: expected a whole number of at least 1"
        raise ValueError(message)
    asked = _Asked(
        targets=targets.reshape(-1),
        class_weight=class_weight,
        rows_per_chunk=max(1, math.ceil(rows / cut)),
        dtype=_find_dtype(hidden),
        ignore_index=ignore_index,
        reduction=reduction,
        smoothing=label_smoothing,
    )
    losses: Tensor = _Chunked.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, asked)  # type: ignore[no-untyped-call]
    return losses.reshape(targets.shape) if reduction == "none" else losses


def choose_chunks(rows: int, classes: int, features: int, device: torch.device) -> int:
    """So many that a chunk's logits are about as large as all hidden states; no chunk so small that it is slow.

    >>> choose_chunks(16384, 32768, 2048, torch.device("cuda")), choose_chunks(100, 10, 64, torch.device("cpu"))
    (16, 1)
    """
    least = _LEAST_ROWS_HOST if device.type == "cpu" else _LEAST_ROWS_DEVICE
    return max(1, min(math.ceil(classes / features), rows // least))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is asked of the logits.

    Attributes:
        targets: of the rows.
        class_weight: of the classes.
        rows_per_chunk: how many rows at a time.
        dtype: in which the products are computed.
        ignore_index: rows with this target do not count.
        reduction: what becomes of the rows' losses.
        smoothing: how much of a target goes to all classes.
    """

    targets: Tensor
    class_weight: Tensor | None
    rows_per_chunk: int
    dtype: torch.dtype
    ignore_index: int
    reduction: str
    smoothing: float


class _Chunked(torch.autograd.Function):
    """The loss, with its gradients made on the way where they can be."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> Tensor:
        work = _Work((hidden, weight, bias), asked)
        ctx.asked, ctx.grads = asked, None
        ctx.save_for_backward(hidden, weight, bias)
        is_differentiated = asked.reduction != "none" and any(ctx.needs_input_grad)
        losses, grads = work.run(work.counts if is_differentiated else None, ctx.needs_input_grad)
        if is_differentiated:
            ctx.grads = grads
        if asked.reduction == "none":
            return losses
        whole = (
            work.shares.sum() if asked.reduction == "mean" else torch.ones((), dtype=losses.dtype, device=losses.device)
        )
        # Applied in backward, to sums: single gradients would vanish in float16, where a scaler makes the loss larger.
        ctx.scale = torch.where(whole == 0, 0, 1 / whole)
        return losses.sum() / whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # given away: whoever gets them may write into them
        if grads is None:
            work = _Work(ctx.saved_tensors, ctx.asked)
            factors = grad.to(work.wide) if ctx.asked.reduction == "none" else work.counts
            grads = work.run(factors, ctx.needs_input_grad)[1]
        if ctx.asked.reduction != "none":
            scale = grad * ctx.scale
            grads = [None if one is None else one.mul_(scale) for one in grads]
        return (*grads, None)


class _Work:
    """The rows of one loss.

    Attributes:
        wide: the type of sums and losses.
        counts: 1 for each row that counts, else 0.
        shares: how much each row counts in a mean.
    """

    def __init__(self, given: tuple[Tensor, Tensor, Tensor | None], asked: _Asked) -> None:
        _, weight, bias = given
        self._given, self._asked = given, asked
        self._weight = weight.to(asked.dtype)
        self._bias = None if bias is None else bias.to(asked.dtype)
        self.wide = torch.promote_types(asked.dtype, torch.float32)
        self._is_valid = asked.targets != asked.ignore_index
        self._targets = torch.where(self._is_valid, asked.targets, 0)
        self._class_weight = None if asked.class_weight is None else asked.class_weight.to(self.wide)
        self.counts = self._is_valid.to(self.wide)
        self.shares = self.counts if self._class_weight is None else self.counts * self._class_weight[self._targets]

    def run(self, factors: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """The losses of all rows, and the gradients of their sum, each times its factor; none without factors."""
        hidden, weight, bias = self._given
        losses = torch.empty(len(hidden), dtype=self.wide, device=hidden.device)
        is_wanted = [factors is not None and needed[at] and one is not None for at, one in enumerate(self._given)]
        hidden_grad = torch.empty_like(hidden) if is_wanted[0] else None
        weight_grad = torch.zeros_like(weight, dtype=self.wide) if is_wanted[1] else None
        bias_grad = torch.zeros_like(bias, dtype=self.wide) if is_wanted[2] and bias is not None else None
        for start in range(0, len(hidden), self._asked.rows_per_chunk):
            rows = slice(start, start + self._asked.rows_per_chunk)
            part = hidden[rows].to(self._asked.dtype)
            logits = F.linear(part, self._weight, self._bias).to(self.wide)
            losses[rows], summed = self._lose(rows, logits)
            if factors is None:
                continue
            grads = self._differentiate(rows, logits, summed, factors[rows])
            if bias_grad is not None:
                bias_grad += grads.sum(0)
            narrow = grads.to(self._asked.dtype)
            if hidden_grad is not None:
                hidden_grad[rows] = narrow @ self._weight
            if weight_grad is not None:
                _add_product(weight_grad, narrow, part)
            del logits, grads, narrow  # before the next ones are made
        return losses, [
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias is None or bias_grad is None else bias_grad.to(bias.dtype),
        ]

    def _lose(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of some rows, and the logarithms of the sums that they are made with."""
        summed = logits.logsumexp(-1)
        losses = self.shares[rows] * (summed - logits.gather(-1, self._targets[rows, None]).squeeze(-1))
        smoothing = self._asked.smoothing
        if smoothing:
            weights = self._class_weight
            even = (
                summed * logits.shape[-1] - logits.sum(-1)
                if weights is None
                else summed * weights.sum() - logits @ weights
            )
            losses = (1 - smoothing) * losses + (smoothing / logits.shape[-1]) * even
        return torch.where(self._is_valid[rows], losses, 0), summed

    def _differentiate(self, rows: slice, logits: Tensor, summed: Tensor, factors: Tensor) -> Tensor:
        """Turn logits into the gradient of the rows' losses by them, each times its factor."""
        smoothing, classes, weights = self._asked.smoothing, logits.shape[-1], self._class_weight
        factors = torch.where(self._is_valid[rows], factors, 0)
        own = factors * self.shares[rows] * (1 - smoothing)
        even = factors * (smoothing / classes)
        everywhere = own + even * (classes if weights is None else weights.sum())
        logits.sub_(summed[:, None]).exp_().mul_(everywhere[:, None])
        logits.scatter_add_(-1, self._targets[rows, None], -own[:, None])
        if smoothing:
            logits.sub_(even[:, None] if weights is None else even[:, None] * weights)
        return logits


def _add_product(total: Tensor, grads: Tensor, hidden: Tensor) -> None:
    """Add ``grads.T @ hidden``, in the precision of the sum."""
    if total.dtype == hidden.dtype:
        total.addmm_(grads.T, hidden)
    else:
        total += grads.T @ hidden


def _find_dtype(hidden: Tensor) -> torch.dtype:
    """The type in which a linear layer would compute here."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> None:
    tensors = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, "class_weight": class_weight}
    for name, given in tensors.items():
        if not isinstance(given, Tensor) and (given is not None or name in {"hidden", "weight", "targets"}):
            hint = f"; of a layer, pass its {name}" if isinstance(given, nn.Module) else ""
            message = f"{name}={short_repr(given)}: expected a tensor{hint}"
            raise TypeError(message)
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        message = f"targets are {targets.dtype}: expected class indices; probabilities are not supported"
        raise TypeError(message)
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:  # noqa: PLR2004
        message = f"{shapes}: expected hidden [..., features] and weight [classes, features]"
        raise ValueError(message)
    if hidden.shape[:-1] != targets.shape:
        message = f"{shapes}: expected one target for each row of hidden"
        raise ValueError(message)
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and vector.shape != weight.shape[:1]:
            message = f"{name} {list(vector.shape)}: expected one number for each of {weight.shape[0]} classes"
            raise ValueError(message)
