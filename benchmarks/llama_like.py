"""The model behind the measured tables: a plain pre-norm transformer with rotary attention and SwiGLU.

`LlamaLike(1024, 24, 1024)` is the launch-bound case, `LlamaLike(2048, 16, 4096)` the compute-bound one; batch 4, bf16.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD_DIM = 128


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight)


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, dim))
        return out


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    return t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim)
        self.mlp = SwiGLU(dim, int(8 * dim / 3) // 256 * 256)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


Layers = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]
"""Runs the blocks on x, cos and sin: where a benchmark decides what a region is."""


def one_by_one(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, cos, sin)
    return x


class LlamaLike(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, layers: int, tokens: int, *, vocab: int = 32000, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, dropout) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        frequency = 10000 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angle = torch.outer(torch.arange(tokens).float(), frequency)
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin(), persistent=False)

    def forward(self, ids: Tensor, run: Layers = one_by_one) -> Tensor:
        x = self.embed(ids)
        x = run(self.layers, x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())
