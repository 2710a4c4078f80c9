"""Small models of the kinds that people train, each with inputs for a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *, is_causal: bool = True) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, dropout_p=dropout)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, dropout=dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class GPT(nn.Module):
    """Embedding, blocks, a head that shares its weight with the embedding."""

    def __init__(self, width: int = 16, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.up(x)))
        return result


class MoEBlock(nn.Module):
    """Each token goes to its two best experts."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, choices = self.router(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, ranks = (choices == index).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, ranks, None])
        return x + mixed.view_as(x)


class MoE(nn.Module):
    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(MoEBlock(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


class UNet(nn.Module):
    """Skip connections; its parts are attributes, in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(2, 4), DoubleConv(4, 8)
        self.middle = DoubleConv(8, 8)
        self.up2, self.up1 = DoubleConv(16, 4), DoubleConv(8, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2)
        x = F.interpolate(self.up2(torch.cat([x, second], 1)), scale_factor=2)
        result: Tensor = self.head(self.up1(torch.cat([x, first], 1)))
        return result


class ViT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        result: Tensor = self.head(x[:, 0])
        return result


class Stage(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.widen = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.widen(x)
        return result


class Stages(nn.Module):
    """As Swin is built: stages of growing width, each of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(4, 2), Stage(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Tagger(nn.Module):
    """A recurrent net around torch's LSTM and RNN, and a cell called once for each time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, dropout=0.2)
        self.rnn = nn.RNN(6, 6, batch_first=True)
        self.cell = nn.GRUCell(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(self.lstm(x)[0])
        state = torch.zeros_like(x[:, 0])
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        result: Tensor = self.head(state)
        return result


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        result: Tensor = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        return result


class Looped(nn.Module):
    """One block called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


def convolutional() -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3))
    return nn.Sequential(stage(3, 4), stage(4, 8), nn.MaxPool2d(2), stage(8, 8), head)


Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]

MODELS: dict[str, Build] = {
    "gpt": lambda: (GPT(), (torch.randint(0, 32, (2, 6)),)),
    "moe": lambda: (MoE(), (torch.randn(2, 5, 4),)),
    "unet": lambda: (UNet(), (torch.randn(2, 2, 8, 8),)),
    "vit": lambda: (ViT(), (torch.randn(2, 3, 8, 8),)),
    "stages": lambda: (Stages(), (torch.randn(2, 5, 4),)),
    "tagger": lambda: (Tagger(), (torch.randn(2, 4, 4),)),
    "translator": lambda: (Translator(), (torch.randn(2, 5, 8), torch.randn(2, 4, 8))),
    "convolutional": lambda: (convolutional(), (torch.randn(2, 3, 8, 8),)),
    "looped": lambda: (Looped(), (torch.randn(2, 5, 8),)),
}
