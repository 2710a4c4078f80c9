"""Blocks with the edits that region-based engines ask for, made of the modules and parameters of a plain block."""

from collections.abc import Callable, Collection
from typing import Any

from llama_like import Attention, Block, rotate
from peers import torch_remat
from torch import Tensor, nn
from torch.nn import functional

import recollect


class NamedBlock(Block):
    """A block whose attention kernel is the region ``sdpa``; its linear layers need no edit, they have paths."""

    def __init__(self, block: Block) -> None:
        _adopt(self, block)
        self.attention = _NamedAttention(block.attention)


class _NamedAttention(Attention):
    def __init__(self, attention: Attention) -> None:
        _adopt(self, attention)
        self.heads = attention.heads
        self._attend = recollect.region("sdpa")(functional.scaled_dot_product_attention)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = _rotated(self.qkv(x), self.heads, cos, sin)
        y = self._attend(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return out


class RematBlock(Block):
    """A block annotated for torch_remat: ``qkv``, ``sdpa``, ``out``, ``gate``, ``up`` and ``down`` are kept or not.

    torch_remat replays to the end of a block, so the last addition belongs to ``down``, as its documentation advises.
    Keeping its result costs nothing, as the next block's input, and spares a placeholder, which CPU-only torch lacks.
    """

    def __init__(self, block: Block, kept: Collection[str]) -> None:
        _adopt(self, block)
        self._kept = frozenset(kept)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self._region(self.attention.qkv, "qkv")(self.norm1(x))
        torch_remat.recompute_needs_tensor(qkv)
        q, k, v = _rotated(qkv, self.attention.heads, cos, sin)
        y = self._region(functional.scaled_dot_product_attention, "sdpa")(q, k, v, is_causal=True)
        torch_remat.recompute_needs_tensor(y)
        out = self._region(self.attention.out, "out")(y.transpose(1, 2).reshape(x.shape))
        torch_remat.recompute_needs_tensor(out)
        x = x + self.dropout(out)
        normed = self.norm2(x)
        gate, up = self._region(self.mlp.gate, "gate")(normed), self._region(self.mlp.up, "up")(normed)
        torch_remat.recompute_needs_tensor(gate, up)
        last: Tensor = self._region(self._down, "down")(x, functional.silu(gate) * up)
        torch_remat.recompute_needs_tensor(last)
        return last

    def _region(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        wrapped: Callable[..., Any] = torch_remat.region(function, name, recompute=name not in self._kept)
        return wrapped

    def _down(self, x: Tensor, hidden: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.mlp.down(hidden))
        return result


def _rotated(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    q, k, v = (t.transpose(1, 2) for t in qkv.view(batch, tokens, 3, heads, width // 3 // heads).unbind(2))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _adopt(module: nn.Module, other: nn.Module) -> None:
    """Give a new module the children of another, in place of its own."""
    nn.Module.__init__(module)
    for name, child in other.named_children():
        module.add_module(name, child)
