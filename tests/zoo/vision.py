"""ResNet, ConvNeXt, DenseNet and Swin as timm builds them, at small sizes.

Built by hand: timm imports torchvision, whose wheel loads only where CUDA is.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class DropPath(nn.Module):
    """Leaves out a block for some of the samples."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p)


class Classifier(nn.Module):
    """A stem, stages, and a head; its output is the loss."""

    def __init__(self, stem: nn.Module, stages: nn.Module, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.stem, self.stages, self.norm = stem, stages, norm
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.stages(self.stem(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    """Convolutions with batch norm, activations in place, a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1, self.act1 = conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2, self.bn2, self.act2 = conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv3, self.bn3, self.act3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.drop_path = DropPath(0.2)
        self.downsample = (
            nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)) if inputs != outputs else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        x = self.drop_path(self.bn3(self.conv3(x)))
        x += shortcut
        result: Tensor = self.act3(x)
        return result


def resnet(width: int = 8, depth: int = 3) -> nn.Module:
    stem = nn.Sequential(conv(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages, here = nn.Sequential(), width
    for stage in range(2):
        blocks = nn.Sequential()
        for number in range(depth):
            blocks.append(Bottleneck(here, width * 2**stage, 2 if stage and not number else 1))
            here = 4 * width * 2**stage
        stages.append(blocks)
    return Classifier(stem, stages, nn.Identity(), here)


class LayerNorm2d(nn.LayerNorm):
    """Over channels, which come second."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, and a perceptron over channels that come last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
        self.gamma = nn.Parameter(torch.full((width,), 0.1))
        self.drop_path = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        result: Tensor = x + self.drop_path(y.mul(self.gamma.reshape(1, -1, 1, 1)))
        return result


def convnext(width: int = 16, depth: int = 3) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), LayerNorm2d(width))
    stages = nn.Sequential(
        nn.Sequential(*[ConvNeXtBlock(width) for _ in range(depth)]),
        nn.Sequential(
            nn.Sequential(LayerNorm2d(width), nn.Conv2d(width, 2 * width, 2, 2)),
            *[ConvNeXtBlock(2 * width) for _ in range(depth)],
        ),
    )
    return Classifier(stem, stages, LayerNorm2d(2 * width), 2 * width)


class DenseLayer(nn.Module):
    """Reads all that the layers before it in its block have made."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), conv(inputs, 4 * growth, 1)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True)
        self.conv2 = conv(4 * growth, growth, 3)

    def forward(self, features: list[Tensor]) -> Tensor:
        y = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return F.dropout(self.conv2(self.relu2(self.norm2(y))), 0.1, training=self.training)


class DenseBlock(nn.ModuleDict):
    def __init__(self, inputs: int, growth: int, depth: int) -> None:
        super().__init__()
        for number in range(depth):
            self[f"denselayer{number + 1}"] = DenseLayer(inputs + number * growth, growth)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(width: int = 16, growth: int = 8, depth: int = 4) -> nn.Module:
    here = width + depth * growth
    stem = nn.Sequential(conv(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    transition = nn.Sequential(nn.BatchNorm2d(here), nn.ReLU(inplace=True), conv(here, width, 1), nn.AvgPool2d(2, 2))
    stages = nn.Sequential(DenseBlock(width, growth, depth), transition, DenseBlock(width, growth, depth))
    return Classifier(stem, stages, nn.BatchNorm2d(here), here)


class WindowAttention(nn.Module):
    """Attention within windows, biased by how far apart two places are."""

    index: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        apart = places[:, None] - places[None] + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1], persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.flatten()].unflatten(0, self.index.shape).permute(2, 0, 1)[None]
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1) + bias
        if mask is not None:
            scores = scores.unflatten(0, (-1, len(mask))) + mask[None, :, None]
            scores = scores.flatten(0, 1)
        result: Tensor = self.proj((F.dropout(scores.softmax(-1), 0.1, self.training) @ v).transpose(1, 2).flatten(2))
        return result


class SwinBlock(nn.Module):
    """Attention in windows, which every second block shifts."""

    mask: Tensor | None

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, window)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop_path = DropPath(0.1)
        mask = None
        if shift:
            rows = torch.zeros(size)
            rows[-window:] = 1
            rows[-shift:] = 2
            parts = self.windows((rows[:, None] * 3 + rows[None])[None, ..., None]).squeeze(-1)
            mask = (parts[:, None] != parts[:, :, None]) * -100.0
        self.register_buffer("mask", mask, persistent=False)

    def windows(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = x.view(batch, height // self.window, self.window, width // self.window, self.window, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        shifted = self.norm1(x)
        if self.shift:
            shifted = shifted.roll((-self.shift, -self.shift), (1, 2))
        y = self.attn(self.windows(shifted), self.mask)
        y = y.view(batch, height // self.window, width // self.window, self.window, self.window, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        x = x + self.drop_path(y)
        result: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return result


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


def swin(width: int = 16, depth: int = 4, size: int = 8) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), ChannelsLast(), nn.LayerNorm(width))
    blocks = nn.Sequential(*[SwinBlock(width, 2, size, 4, 2 * (number % 2)) for number in range(depth)])
    return Classifier(stem, blocks, nn.Sequential(nn.LayerNorm(width), ChannelsFirst()), width)
