"""Recurrent nets as cuDNN and oneDNN run them: one call, which reserves memory for backward.

How much it reserves cuDNN alone knows; here it is guessed from what the formulas need: gates and states of each step.
What oneDNN reserves for an LSTM was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.fake import RECURRENT_BY_CUDNN

_MODES = {"rnn_relu.input": 0, "rnn_tanh.input": 1, "lstm.input": 2, "gru.input": 3}
_KEPT = {0: 1, 1: 1, 2: 6, 3: 5}
"""Values for each step and unit that are reserved, by mode."""


def recurrent_kernels() -> dict[str, Callable[..., Any]]:
    """Kernels by operator; each is given what composes the operator otherwise, then its arguments."""
    return {name: _kernel_of(mode, has_cell=name.startswith("lstm")) for name, mode in _MODES.items()}


def _kernel_of(mode: int, *, has_cell: bool) -> Callable[..., Any]:
    def run(compose: Callable[..., Any], x: Tensor, hx: Any, params: list[Tensor], *options: Any) -> Any:
        has_biases, layers, dropout, train, bidirectional, batch_first = options
        h, c = hx if has_cell else (hx, None)
        if len({p.dtype for p in params} | {x.dtype}) > 1 or len(params) % (layers * (1 + bidirectional)):
            return compose(x, hx, params, *options)
        weights = 4 if has_biases else 2
        if has_cell and len(params) // (layers * (1 + bidirectional)) > weights:  # projections
            return compose(x, hx, params, *options)
        state = torch.empty(0, dtype=torch.uint8) if dropout else None
        out, hy, cy, *_ = RECURRENT_BY_CUDNN(
            *(x, params, weights, x.new_empty(0), h, c, mode, h.shape[-1], 0, layers, batch_first, dropout, train),
            *(bool(bidirectional), [], state),
        )
        return (out, hy, cy) if has_cell else (out, hy)

    return run


def _reserve(args: tuple[Any, ...], result: Any) -> Any:
    x, mode, hidden, layers, train, bidirectional = args[0], args[6], args[7], args[9], args[12], args[13]
    if not train:
        return result
    steps = x.numel() // x.shape[-1]
    count = steps * hidden * layers * (1 + bidirectional) * _KEPT[mode]
    reserve = torch.empty(count * x.dtype.itemsize, dtype=torch.uint8)
    return (*result[:3], reserve, *result[4:])


_PAGE_BYTES = 4096
_LINE_BYTES = 64
_ALIASED = 256  # values: rows of a multiple of that get one more line


def run_on_cpu(*args: Any) -> Any:
    """One layer and direction of an LSTM as oneDNN runs it: torch's own form for fake tensors reserves nothing.

    It reserves gates and the hidden state of each step; for two layers, the input's among them, and for one step more,
    states and gradients. Rows are whole cache lines, buffers whole pages. Measured for 30 sizes on x86, in float32.
    """
    x, hx, cx, hidden, is_training = args[0], args[5], args[6], args[10], args[15]
    (steps, batch, inputs), size = x.shape, int(x.dtype.itemsize)
    line = _LINE_BYTES // size

    def row(width: int) -> int:
        whole = -(-width // line) * line
        return whole + line if whole % _ALIASED == 0 else whole

    by_step, by_layer = steps * batch * size, 2 * (steps + 1) * batch * size
    buffers = [by_step * row(4 * hidden), by_step * row(hidden)]
    buffers += [by_layer * row(max(inputs, hidden))] * 3 + [by_layer * hidden] * 2
    pages = sum(-(-buffer // _PAGE_BYTES) for buffer in buffers) if is_training else 0
    reserve = torch.empty(pages * _PAGE_BYTES, dtype=torch.uint8)
    return x.new_empty(steps, batch, hidden), torch.empty_like(hx), torch.empty_like(cx), reserve


RESERVES: dict[str, Callable[[tuple[Any, ...], Any], Any]] = {"aten._cudnn_rnn.default": _reserve}
"""Gives results the memory that they reserve, by operator."""


def _backward(args: tuple[Any, ...]) -> Any:
    x, weights, _, _, hx, cx = args[:6]
    wanted = args[-1]
    return (
        torch.empty_like(x) if wanted[0] else None,
        torch.empty_like(hx) if wanted[1] else None,
        torch.empty_like(cx) if wanted[2] and cx is not None else None,
        [torch.empty_like(weight) for weight in weights] if wanted[3] else [],
    )


BACKWARDS: dict[str, Callable[[tuple[Any, ...]], Any]] = {"aten._cudnn_rnn_backward.default": _backward}
"""Gives results of operators that do not support fake tensors."""
