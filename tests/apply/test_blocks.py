"""The blocks that are picked are those that people would pick, and the table folds them."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._apply.applied import AppliedPlace, describe_places


def table(model: nn.Module) -> list[str]:
    with recollect.apply(model) as handle:
        return [" ".join(row.split("  ")[0:1]) for row in str(handle).splitlines()[2:]]


class NormAct(nn.BatchNorm2d):
    """As timm has them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result: Tensor = self.act(self.drop(super().forward(input)))
        return result


class DenseLayer(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormAct(width), nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = NormAct(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        result: Tensor = self.conv2(self.norm2(self.conv1(self.norm1(torch.cat(features, 1)))))
        return result


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers: int, width: int, growth: int) -> None:
        super().__init__()
        for n in range(layers):
            self.add_module(f"denselayer{n + 1}", DenseLayer(width + n * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.add_module("norm", NormAct(width))
        self.add_module("conv", nn.Conv2d(width, width // 2, 1, bias=False))
        self.add_module("pool", nn.AvgPool2d(2))


def dense_net(layers: Iterable[int], width: int = 8, growth: int = 4) -> nn.Sequential:
    """DenseNet as timm and torchvision build it."""
    features: list[tuple[str, nn.Module]] = [("conv0", nn.Conv2d(3, width, 3, padding=1)), ("norm0", NormAct(width))]
    for n, count in enumerate(layers):
        features += [(f"denseblock{n + 1}", DenseBlock(count, width, growth))]
        width += count * growth
        features += [(f"transition{n + 1}", Transition(width))]
        width //= 2
    features += [("norm5", NormAct(width))]
    model = nn.Sequential()
    for name, part in features:
        model.add_module(name, part)
    return model


def test_of_a_dense_net_the_dense_layers_are_picked() -> None:
    model = dense_net([4, 6, 5])
    with recollect.apply(model) as handle:
        assert {place.class_name for place in handle.places} == {"DenseLayer"}
        assert len(handle.places) == 15
        model(torch.randn(2, 3, 16, 16)).sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_of_a_segformer_no_projections_are_picked() -> None:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes: Any = {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 8, "num_attention_heads": [1, 1, 2, 2]}
    model = SegformerForSemanticSegmentation(SegformerConfig(**sizes, depths=[2, 2, 3, 2]))
    with recollect.apply(model) as handle:
        assert {place.class_name for place in handle.places} == {"SegformerLayer"}
        assert str(handle).splitlines()[2].startswith("segformer.stages.*.blocks.* (9)  SegformerLayer  recompute")


def test_where_all_blocks_have_one_product_they_are_picked() -> None:
    assert table(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))) == ["0-2"]


@pytest.mark.filterwarnings("ignore")
def test_of_a_u_net_every_block_is_picked_also_where_a_stage_has_one() -> None:
    from diffusers import UNet2DConditionModel

    kinds: Any = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 4,
        "norm_num_groups": 4, "sample_size": 8,
    }  # fmt: skip
    model = UNet2DConditionModel(**kinds)
    names = ("ResnetBlock2D", "Transformer2DModel", "Downsample2D", "Upsample2D")
    blocks = [m for m in model.modules() if type(m).__name__ in names]
    with recollect.apply(model) as handle:
        assert len(handle.places) == len(blocks)
    model.enable_gradient_checkpointing()
    with pytest.warns(
        UserWarning, match=rf"on for {len(blocks)} of the regions.*model\.disable_gradient_checkpointing"
    ):
        recollect.apply(model).remove()


def place(name: str, what: str = "recompute") -> AppliedPlace:
    return AppliedPlace(name=name, class_name="Block", what=what, rule="r", is_region=True, is_kept=False)


def test_equal_rows_fold_across_stages() -> None:
    names = [f"stages.{stage}.blocks.{n}" for stage, count in enumerate([3, 3, 9, 3]) for n in range(count)]
    assert describe_places([place(name) for name in names])[1].startswith("stages.*.blocks.* (18)  Block")
    names = [f"layers.{n}.experts.{expert}" for n in range(2) for expert in range(4)]
    assert describe_places([place(name) for name in names])[1].startswith("layers.0-1.experts.0-3  Block")
    different = [place("layers.0"), place("layers.1", "save"), place("layers.2")]
    assert [row.split()[0] for row in describe_places(different)] == ["module", "layers.0,2", "layers.1"]


class Conv(nn.Module):
    """A block, the first of its stage with a shortcut."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(given, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Identity() if given == width else nn.Conv2d(given, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shortcut(x) + self.conv2(self.conv1(x).relu())
        return result


class Separable(Conv):
    """Another block, of which there is one."""


class Stage(nn.Module):
    """Holds its blocks in a list."""

    def __init__(self, given: int, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Conv(width if n else given, width) for n in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


class ByName(nn.Module):
    """Holds its blocks by names, as RegNet does."""

    def __init__(self, given: int, width: int, depth: int) -> None:
        super().__init__()
        for n in range(depth):
            self.add_module(f"b{n + 1}", Conv(width if n else given, width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.s1, self.s2, self.s3 = ByName(4, 8, 1), ByName(8, 16, 1), ByName(16, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.s3(self.s2(self.s1(self.stem(x))))
        return result


def test_stages_of_few_blocks_are_passed_through_if_others_repeat_theirs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Stage(4, 8, 2), Stage(8, 16, 3), Stage(16, 32, 2))
    with recollect.apply(model) as handle:
        assert {place.class_name for place in handle.places} == {"Conv"}
        assert len(handle.places) == 7


def test_stages_of_which_two_have_the_same_sizes_are_passed_through() -> None:
    """As those of the decoder of Stable Diffusion's autoencoder; two of three would be most of them."""
    stages = [Stage(8, 8, 3), Stage(8, 8, 3), Stage(8, 4, 3), Stage(4, 2, 3)]
    with recollect.apply(nn.Sequential(*stages)) as handle:
        assert len(handle.places) == 12
    with recollect.apply(nn.Sequential(*stages[:3])) as handle:
        assert [place.class_name for place in handle.places] == ["Stage"] * 3
    alternating = [Stage(*widths, 3) for _ in range(3) for widths in ((8, 4), (4, 8))]
    with recollect.apply(nn.Sequential(*alternating)) as handle:
        assert [place.class_name for place in handle.places] == ["Stage"] * 6


class ConvNorm(nn.Sequential):
    """A convolution with its norm."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__(nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width))


class Bottleneck(nn.Module):
    """A block that lists its convolutions, as those of ResNet and RegNet in Transformers."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.shortcut = nn.Identity() if given == width else nn.Conv2d(given, width, 1)
        self.layer = nn.Sequential(ConvNorm(given, width), ConvNorm(width, width), ConvNorm(width, width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shortcut(x) + self.layer(x)
        return result


class BottleneckStage(nn.Module):
    def __init__(self, given: int, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Bottleneck(width if n else given, width) for n in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("depths", [(2, 2, 2), (2, 3, 1), (1, 2, 1)])
def test_blocks_that_list_their_convolutions_are_no_stages_of_stages(depths: tuple[int, ...]) -> None:
    stages = [BottleneckStage(4 << n, 8 << n, depth) for n, depth in enumerate(depths)]
    with recollect.apply(nn.ModuleDict({"stages": nn.ModuleList(stages)})) as handle:
        assert {place.class_name for place in handle.places} == {"Bottleneck"}
        assert len(handle.places) == sum(depths)


class Middle(nn.Module):
    """Blocks in one list, and what stands between them in others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Conv(8, 8), Conv(8, 8)])
        self.attentions = nn.ModuleList([Separable(8, 8)])
        self.enlarging = nn.ModuleList([nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3))])
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1)])
        self.norms = nn.ModuleList([nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())])


def test_a_single_block_beside_a_list_of_blocks_is_picked() -> None:
    assert table(nn.ModuleDict({"middle": Middle(), "other": nn.ModuleList([Separable(8, 8)])})) == [
        "middle.blocks.0-1",
        "middle.attentions.0",
        "middle.enlarging.0",
    ]


def test_what_lists_blocks_that_are_picked_elsewhere_is_a_stage() -> None:
    """As all the decoder's stages of an autoencoder of one width, whose encoder's differ."""
    stages = [Stage(8, 8, 3), Stage(8, 8, 3), Stage(8, 8, 3)]
    with recollect.apply(nn.Sequential(nn.Sequential(Conv(3, 8), Conv(8, 8)), nn.Sequential(*stages))) as handle:
        assert {place.class_name for place in handle.places} == {"Conv"}
        assert len(handle.places) == 11
    with recollect.apply(nn.Sequential(*stages)) as handle:
        assert [place.class_name for place in handle.places] == ["Stage"] * 3


def test_stages_that_name_their_blocks_are_passed_through() -> None:
    with recollect.apply(Staged()) as handle:
        assert [place.name for place in handle.places] == ["s1.b1", "s2.b1", "s3.b1", "s3.b2", "s3.b3"]


def test_a_stage_of_another_class_counts_beside_stages_that_repeat_theirs() -> None:
    stages = [nn.Sequential(Separable(4, 8)), nn.Sequential(Conv(8, 16), Conv(16, 16)), nn.Sequential(Conv(16, 32))]
    with recollect.apply(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*stages))) as handle:
        assert [place.name for place in handle.places] == ["1.0.0", "1.1.0", "1.1.1", "1.2.0"]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        result: Tensor = value * gate.sigmoid()
        return result


class TwoStreams(nn.Module):
    """As those of diffusion transformers: the last has no second stream, so that two of them have other sizes."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.ff = nn.ModuleList([Gated(), nn.Dropout(0.0), nn.Linear(4, 4)])
        self.ff_context = None if is_last else nn.ModuleList([Gated(), nn.Dropout(0.0), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.ff, *(self.ff_context or ())):
            x = part(x)
        return x


def test_blocks_of_other_sizes_are_no_stages_for_layers_that_no_list_repeats() -> None:
    with recollect.apply(nn.ModuleList([TwoStreams(is_last=False), TwoStreams(is_last=True)])) as handle:
        assert [place.name for place in handle.places] == ["0", "1"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(12, 4))
        self.mlp = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(self.attention(x))
        return result


class Layers(nn.Module):
    """As the transformers in the U-Net of Stable Diffusion XL."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(4), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_modules_that_are_little_more_than_a_list_of_blocks_are_passed_through() -> None:
    with recollect.apply(nn.Sequential(Layers(), Layers())) as handle:
        assert [place.name for place in handle.places] == [f"{n}.layers.{m}" for n in range(2) for m in range(3)]


class Temporal(Layer):
    """One of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mix(super().forward(x))
        return result


class SpaceAndTime(nn.Module):
    """As the transformers in the U-Net of Stable Video Diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.space = nn.ModuleList([Layer()])
        self.time = nn.ModuleList([Temporal()])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.time[0](self.space[0](self.norm(x)))
        return result


def test_of_modules_that_are_little_more_than_lists_of_one_block_the_blocks_are_picked() -> None:
    with recollect.apply(nn.Sequential(SpaceAndTime(), SpaceAndTime())) as handle:
        assert [place.name for place in handle.places] == [
            f"{n}.{part}.0" for n in range(2) for part in ("space", "time")
        ]


def test_stages_of_one_block_each_are_as_good_as_a_list() -> None:
    stages = [nn.Sequential(Conv(4, 8)), nn.Sequential(Conv(8, 16)), nn.Sequential(Conv(16, 32))]
    with recollect.apply(nn.Sequential(nn.Conv2d(3, 4, 3), *stages)) as handle:
        assert [place.name for place in handle.places] == ["1.0", "2.0", "3.0"]


class Standardised(nn.Conv2d):
    """A layer, whatever it does to its weight."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return nn.functional.conv2d(input, self.weight - self.weight.mean(), self.bias)


def test_a_list_of_one_block_is_no_stage_where_another_list_repeats_its_class() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.down(self.up(x))

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.experts = nn.Linear(4, 4), nn.ModuleList(Expert() for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            return sum(expert(self.attention(x)) for expert in self.experts)

    model = nn.ModuleDict({"one": nn.ModuleList([Routed()]), "two": nn.ModuleList([Routed(), Routed()])})
    assert table(model) == ["one.0", "two.0-1"]


def test_layers_of_other_classes_than_torchs_are_no_blocks() -> None:
    stem = nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), Standardised(4, 4, 3), nn.ReLU())
    with recollect.apply(nn.Sequential(stem, nn.Sequential(Conv(4, 8), Conv(8, 8)))) as handle:
        assert [place.name for place in handle.places] == ["1.0", "1.1"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.out(self.qkv(x)[..., :8].tanh())
        return found


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.router(x).softmax(-1)
        return x + torch.stack([expert(x) for expert in self.experts], -1) @ weights[..., None]


@pytest.mark.parametrize(
    "write", [lambda parts: nn.Sequential(*parts), nn.ModuleList], ids=["Sequential", "ModuleList"]
)
def test_layers_that_are_lists_of_parts_are_picked_before_the_experts_inside(write: Any) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.ModuleList(write([Attention(), Experts()]) for _ in range(3)))
    assert table(model) == ["1.0-2.0", "1.0-2.1"]


def test_lists_may_hold_nothing_in_places() -> None:
    """As the attentions of the stages in the autoencoder of Cosmos."""
    stage = nn.Module()
    stage.blocks, stage.attentions = nn.ModuleList([Attention(), Attention()]), nn.ModuleList([None])  # type: ignore[list-item]
    assert table(nn.Sequential(stage)) == ["0.blocks.0-1"]
