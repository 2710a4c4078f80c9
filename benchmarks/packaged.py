"""Models of Transformers and diffusers with random weights, and the ways to train them: plain, ours, torch's.

Each is built at two sizes: small ones are bound by launches on an accelerator, large ones by its compute.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as rival
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect

PLAIN = "plain"
OURS = "recollect full"
OURS_SELECTIVE = "recollect selective"
SWITCH = "its own switch"
REENTRANT = "its own switch, reentrant"
BY_HAND = "torch by hand"
SAC = "torch SAC by hand"
CONTENDERS = (PLAIN, OURS, SWITCH, REENTRANT, BY_HAND, OURS_SELECTIVE, SAC)


class Size(NamedTuple):
    """Of a transformer, or of what comes near to it."""

    width: int
    layers: int
    tokens: int
    batch: int


SMALL = Size(width=512, layers=8, tokens=256, batch=2)
TINY = Size(width=64, layers=4, tokens=32, batch=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model of a package.

    Attributes:
        build: makes it at a size.
        inputs: makes what a step is given, for the same size.
        large: a size that an accelerator is busy with.
        loss: makes the loss of what a call gives.
    """

    build: Callable[[Size], Any]
    inputs: Callable[[Size], dict[str, Tensor]]
    large: Size
    loss: Callable[[Any], Tensor] = lambda output: output.loss


VOCAB = 8192


def ids(size: Size) -> Tensor:
    return torch.randint(3, VOCAB, (size.batch, size.tokens))


def text(size: Size) -> dict[str, Tensor]:
    tokens = ids(size)
    return {"input_ids": tokens, "labels": tokens}


def of_transformers(name: str, config: str, options: Callable[[Size], dict[str, Any]]) -> Callable[[Size], Any]:
    def build(size: Size) -> Any:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options(size)))

    return build


def grouped(size: Size) -> dict[str, Any]:
    """What decoders of the Llama family share."""
    heads = max(2, size.width // 64)
    return {
        "vocab_size": VOCAB,
        "hidden_size": size.width,
        "intermediate_size": size.width * 11 // 4 // 64 * 64,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": size.width // heads,
        "max_position_embeddings": 2 * size.tokens,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def causal(name: str, config: str = "", *, large: Size, **more: Any) -> Packaged:
    build = of_transformers(f"{name}ForCausalLM", config or f"{name}Config", lambda size: {**grouped(size), **more})
    return Packaged(build=build, inputs=text, large=large)


def gpt2(size: Size) -> dict[str, Any]:
    heads = max(2, size.width // 64)
    return {
        "vocab_size": VOCAB, "n_positions": size.tokens, "n_embd": size.width, "n_layer": size.layers,
        "n_head": heads, "bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM",
    }  # fmt: skip


def encoder(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width, "intermediate_size": 4 * size.width, "num_hidden_layers": size.layers,
        "num_attention_heads": max(2, size.width // 64),
    }  # fmt: skip


def t5(size: Size) -> dict[str, Any]:
    heads = max(2, size.width // 64)
    return {
        "vocab_size": VOCAB, "d_model": size.width, "d_ff": 4 * size.width, "d_kv": size.width // heads,
        "num_layers": size.layers // 2, "num_heads": heads, "decoder_start_token_id": 0,
    }  # fmt: skip


def whisper(size: Size) -> dict[str, Any]:
    heads = max(2, size.width // 64)
    return {
        "vocab_size": VOCAB, "d_model": size.width, "encoder_layers": size.layers // 2,
        "decoder_layers": size.layers // 2, "encoder_attention_heads": heads, "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * size.width, "decoder_ffn_dim": 4 * size.width, "num_mel_bins": 80,
        "max_source_positions": size.tokens, "max_target_positions": size.tokens, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }  # fmt: skip


def whisper_inputs(size: Size) -> dict[str, Tensor]:
    return {"input_features": torch.randn(size.batch, 80, 2 * size.tokens), "labels": ids(size)[:, : size.tokens // 2]}


def pictures(size: Size, side: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size.batch, 3, side, side), "labels": torch.randint(2, (size.batch,))}


def convnext(size: Size) -> dict[str, Any]:
    width, deep = size.width // 4, max(3, size.layers // 2)
    return {"hidden_sizes": [width, 2 * width, 4 * width, 8 * width], "depths": [3, 3, deep, 3], "drop_path_rate": 0.1}


def side_of(size: Size) -> int:
    """Of the noise that the U-Net is given."""
    return 32 if size.width >= 512 else 8


def unet(size: Size) -> Any:
    from diffusers import UNet2DConditionModel

    width = size.width // 2
    return UNet2DConditionModel(
        sample_size=side_of(size),
        block_out_channels=(width, 2 * width, 4 * width),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=256,
        attention_head_dim=8,
        norm_num_groups=16,
    )


def noisy(size: Size) -> dict[str, Tensor]:
    return {
        "sample": torch.randn(size.batch, 4, side_of(size), side_of(size)),
        "timestep": torch.randint(1000, (size.batch,)),
        "encoder_hidden_states": torch.randn(size.batch, 77, 256),
    }


MODELS: dict[str, Packaged] = {
    "llama": causal("Llama", large=Size(2048, 8, 2048, 4)),
    "qwen3": causal("Qwen3", large=Size(2048, 8, 2048, 4)),
    "gpt2": Packaged(
        build=of_transformers("GPT2LMHeadModel", "GPT2Config", gpt2), inputs=text, large=Size(1024, 12, 1024, 8)
    ),
    "mixtral": causal("Mixtral", large=Size(1024, 6, 2048, 4), num_local_experts=8, num_experts_per_tok=2),
    "gemma3": causal("Gemma3", "Gemma3TextConfig", large=Size(1536, 8, 2048, 4), sliding_window=512),
    "t5": Packaged(
        build=of_transformers("T5ForConditionalGeneration", "T5Config", t5), inputs=text, large=Size(1024, 16, 1024, 8)
    ),
    "whisper": Packaged(
        build=of_transformers("WhisperForConditionalGeneration", "WhisperConfig", whisper),
        inputs=whisper_inputs,
        large=Size(1024, 16, 1500, 8),
    ),
    "vit": Packaged(
        build=of_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            lambda size: {**encoder(size), "image_size": 224 if size.width >= 512 else 64},
        ),
        inputs=lambda size: pictures(size, 224 if size.width >= 512 else 64),
        large=Size(1024, 16, 0, 64),
    ),
    "convnext": Packaged(
        build=of_transformers("ConvNextForImageClassification", "ConvNextConfig", convnext),
        inputs=lambda size: pictures(size, 224 if size.width >= 512 else 64),
        large=Size(512, 18, 0, 64),
    ),
    "unet": Packaged(
        build=unet, inputs=noisy, large=Size(512, 0, 0, 32), loss=lambda output: output.sample.square().mean()
    ),
    "bert": Packaged(
        build=of_transformers("BertForMaskedLM", "BertConfig", lambda size: {**encoder(size), "vocab_size": VOCAB}),
        inputs=lambda size: text(size._replace(tokens=min(size.tokens, 512))),
        large=Size(1024, 16, 512, 16),
    ),
}
"""Those that most people train come first."""


def available() -> list[str]:
    """The models whose package can be imported here."""

    def is_there(package: str) -> bool:
        try:
            __import__(package)
        except ImportError:
            return False
        return True

    return [name for name in MODELS if is_there("diffusers" if name == "unet" else "transformers")]


# The ways to train one.


def twin(model: nn.Module) -> Any:
    """A copy with the same parameters, so that ways to train take no memory beside each other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def blocks_of(model: nn.Module) -> list[Any]:
    with recollect.apply(model) as handle:
        return [model.get_submodule(place.name) for place in handle.places if place.is_region]


def without_cache(model: Any) -> Any:
    """As a package's switch does it: torch's checkpoint cannot run a block again that has filled a cache."""
    for module in model.modules():  # a decoder inside may have a config of its own
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return model


class _Selective:
    """The policy of one region, as torchtitan writes it: attention, and every second matrix product."""

    def __init__(self) -> None:
        self._seen: Counter[bool] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        keeps = "scaled_dot_product" in str(op)
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            keeps = self._seen[ctx.is_recompute] % 2 == 0
            self._seen[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_Selective())


def ways_of(model: Any, contenders: tuple[str, ...]) -> list[str]:
    """Those that this model can be trained by: torch by hand stands in for a switch that its class does not have."""
    if getattr(model, "supports_gradient_checkpointing", True):
        return list(contenders)
    switches = {SWITCH: BY_HAND, REENTRANT: BY_HAND}
    return list(dict.fromkeys(switches.get(contender, contender) for contender in contenders))


def prepare(model: nn.Module, contender: str) -> Any:
    """The model, to be trained this way; None where it has no such switch."""
    model = twin(model)
    switched: Any = model
    if contender == OURS:
        recollect.apply(model)
    elif contender == OURS_SELECTIVE:
        recollect.apply(model, "selective")
    elif contender in {SWITCH, REENTRANT}:
        options = {"use_reentrant": contender == REENTRANT}
        if hasattr(model, "gradient_checkpointing_enable"):
            switched.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        elif contender == SWITCH:
            switched.enable_gradient_checkpointing()
        else:
            return None
    elif contender in {BY_HAND, SAC}:
        more: dict[str, Any] = {"context_fn": _selective_contexts} if contender == SAC else {}
        for block in blocks_of(without_cache(model)):
            block.forward = partial(rival.checkpoint, block.forward, use_reentrant=False, **more)
    return model


def backward(packaged: Packaged, model: Any, inputs: dict[str, Tensor]) -> None:
    """Forward and backward, into gradients that are there already."""
    output = model(**inputs)
    torch.autograd.backward(packaged.loss(output))


def train(packaged: Packaged, model: Any, inputs: dict[str, Tensor]) -> None:
    """One step."""
    backward(packaged, model, inputs)
    model.zero_grad(set_to_none=False)


def gradients(model: nn.Module, run: Callable[[], None]) -> list[Tensor]:
    """What a run adds to the gradients of a model, which are zero before and after; always with the same seed."""
    torch.manual_seed(0)
    run()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=False)
    return found


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(left, right, strict=True))
