"""Six models as people train them. Their outputs are losses, and they are built on the device that is current."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect._core.authors import Role

__recollect_role__ = Role.PROGRAM


class CausalAttention(nn.Module):
    """Attention to what came before, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out


class GPTBlock(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Learned positions, dropout, a head that shares its weight with the embedding."""

    def __init__(
        self, width: int, layers: int, heads: int, tokens: int, *, vocab: int = 50257, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.dropout(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class GroupedAttention(nn.Module):
    """Rotary, with fewer heads of keys than of queries."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, head = heads, groups, width // heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, groups * head, bias=False), nn.Linear(width, groups * head, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the module gives."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (self.groups, -1)).transpose(1, 2) for part in (self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position."""
    half = t.shape[-1] // 2
    return t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin


class LlamaBlock(nn.Module):
    """Grouped attention and a gated perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, groups)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the module gives."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Rotary positions, grouped attention, gated perceptrons."""

    cos: Tensor
    sin: Tensor

    def __init__(  # noqa: PLR0917 (a shape, as papers write it)
        self, width: int, layers: int, heads: int, groups: int, hidden: int, tokens: int, *, vocab: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        head = width // heads
        angle = torch.outer(torch.arange(tokens).float(), 10000 ** (-torch.arange(0, head, 2).float() / head))
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class ViT(nn.Module):
    """As torchvision builds it: torch's own multi-head attention."""

    def __init__(self, width: int, layers: int, heads: int, *, patch: int = 16, image: int = 224) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


class Bottleneck(nn.Module):
    """Three convolutions and a way around them, written in place."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if stride != 1 or inputs != 4 * width
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """ResNet-50."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.blocks = nn.Sequential()
        channels = 64
        for stage, depth in enumerate(depths):
            for block in range(depth):
                width = 64 * 2**stage
                self.blocks.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return functional.cross_entropy(self.head(self.pool(self.blocks(self.stem(images))).flatten(1)), labels)


class ResidualBlock(nn.Module):
    """Two convolutions behind norms, and a way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        y = self.conv1(functional.silu(self.norm1(x)))
        out: Tensor = self.skip(x) + self.conv2(functional.silu(self.norm2(y)))
        return out


class ImageAttention(nn.Module):
    """Attention among all places of an image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = x + self.out(mixed.transpose(-1, -2).reshape(x.shape))
        return out


class UNet(nn.Module):
    """As in diffusion models: residual blocks, attention where images are small, skip connections."""

    def __init__(self, width: int, multiples: tuple[int, ...] = (1, 2, 4), blocks: int = 2) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        channels = [width]
        here = width
        for level, multiple in enumerate(multiples):
            for _ in range(blocks):
                self.down.append(ResidualBlock(here, width * multiple))
                here = width * multiple
                channels.append(here)
            if level + 1 < len(multiples):
                self.shrink.append(nn.Conv2d(here, here, 3, 2, padding=1))
        self.middle = nn.Sequential(ResidualBlock(here, here), ImageAttention(here, 8), ResidualBlock(here, here))
        for level, multiple in reversed(list(enumerate(multiples))):
            for _ in range(blocks):
                self.up.append(ResidualBlock(here + channels.pop(), width * multiple))
                here = width * multiple
            if level:
                self.grow.append(nn.Conv2d(here, here, 3, padding=1))
        self.blocks = blocks
        self.norm = nn.GroupNorm(32, width)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """The loss."""
        x = self.stem(images)
        skips = []
        for number, block in enumerate(self.down, 1):
            x = block(x)
            skips.append(x)
            if number % self.blocks == 0 and number < len(self.down):
                x = self.shrink[number // self.blocks - 1](x)
        x = self.middle(x)
        for number, block in enumerate(self.up, 1):
            x = block(torch.cat([x, skips.pop()], 1))
            if number % self.blocks == 0 and number < len(self.up):
                x = self.grow[number // self.blocks - 1](functional.interpolate(x, scale_factor=2.0))
        return functional.mse_loss(self.head(functional.silu(self.norm(x))), noise)


class Experts(nn.Module):
    """Each token goes to its two best experts, each of which takes as many as it has room for."""

    def __init__(self, width: int, hidden: int, experts: int, *, room: float = 1.25) -> None:
        super().__init__()
        self.experts, self.room = experts, room
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        tokens = x.flatten(0, 1)
        weights, choices = self.router(tokens).float().softmax(-1).topk(2)
        chosen = functional.one_hot(choices.flatten(), self.experts)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        room = int(2 * len(tokens) / self.experts * self.room)
        is_in = place < room
        slots = torch.where(is_in, choices.flatten() * room + place, self.experts * room)
        queues = tokens.new_zeros(self.experts * room + 1, tokens.shape[-1])
        queues = queues.index_copy(0, slots, tokens.repeat_interleave(2, 0))
        queues = queues[:-1].unflatten(0, (self.experts, room))
        made = torch.bmm(functional.silu(torch.bmm(queues, self.up)), self.down).flatten(0, 1)
        back = functional.pad(made, (0, 0, 0, 1)).index_select(0, slots).unflatten(0, (-1, 2))
        out: Tensor = (back * weights.to(back.dtype)[..., None]).sum(1).view_as(x)
        return out


class MoEBlock(nn.Module):
    """Attention, and experts in place of a perceptron."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = CausalAttention(width, heads, 0.0)
        self.experts = Experts(width, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.experts(self.norm2(x))
        return out


class MoE(nn.Module):
    """A decoder whose perceptrons are experts, as Mixtral's are."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int, experts: int, *, vocab: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(MoEBlock(width, heads, hidden, experts) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
