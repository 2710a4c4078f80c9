"""Models that people train, of the packages they come from, with small random weights and inputs for a step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import vision

VOCAB, BATCH, LENGTH = 64, 2, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model, and what a step of it needs.

    Attributes:
        build: makes the model.
        inputs: makes the keyword arguments of a call.
        loss: makes the loss of what a call gives.
        has_switch: whether its package can switch torch's checkpoint on, for the same blocks as ours.
        regions: how many regions ``apply(model)`` makes.
    """

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    has_switch: bool = True
    regions: int = 3


def tokens(length: int = LENGTH) -> Tensor:
    return torch.arange(BATCH * length).reshape(BATCH, length) * 7 % VOCAB


def text() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens()}


def images(size: int = 32) -> Tensor:
    return torch.linspace(-1, 1, BATCH * 3 * size**2).sin().reshape(BATCH, 3, size, size)


def labelled(name: str = "images", size: int = 32) -> dict[str, Any]:
    return {name: images(size), "labels": torch.arange(BATCH)}


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def of_transformers(model: str, config: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options)).train()

    return build


def causal(name: str, **options: Any) -> Kind:
    return Kind(build=of_transformers(f"{name}ForCausalLM", f"{name}Config", **options), inputs=text)


def whisper_inputs() -> dict[str, Any]:
    return {"input_features": torch.linspace(-1, 1, BATCH * 16 * 48).reshape(BATCH, 16, 48), "labels": tokens(12)}


def clip() -> Any:
    import transformers

    common: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    words = {**common, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "eos_token_id": VOCAB - 1}
    config = transformers.CLIPConfig(
        text_config=words, vision_config={**common, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    return transformers.CLIPModel(config).train()


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
        dropout=0.1,
    ).train()


def autoencoder() -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.AutoencoderKL(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    ).train()


def dit() -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=2,
        dropout=0.1,
    ).train()


def noisy(**more: Any) -> dict[str, Any]:
    latent = torch.linspace(-1, 1, BATCH * 4 * 64).sin().reshape(BATCH, 4, 8, 8)
    return {"timestep": torch.tensor([3, 5]), **more, ("hidden_states" if "class_labels" in more else "sample"): latent}


def squared(output: Any) -> Tensor:
    result: Tensor = output.sample.square().mean()
    return result


def lora() -> Any:
    import transformers

    peft = pytest.importorskip("peft")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def by_hand(build: Callable[[], nn.Module], regions: int) -> Kind:
    return Kind(build=build, inputs=labelled, loss=lambda output: output, has_switch=False, regions=regions)


MOE: dict[str, Any] = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
DEEPSEEK: dict[str, Any] = {
    **GROUPED,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WHISPER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 24,
    "max_target_positions": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "dropout": 0.1,
}
ZOO: dict[str, Kind] = {
    "llama": causal("Llama", **GROUPED, attention_dropout=0.1),
    "qwen3": causal("Qwen3", **GROUPED, head_dim=8),
    "qwen3-moe": causal(
        "Qwen3Moe", **MOE, head_dim=8, num_experts=4, moe_intermediate_size=32, router_aux_loss_coef=0.1
    ),
    "mixtral": causal("Mixtral", **MOE, num_local_experts=4),
    "gemma3": Kind(
        build=of_transformers(
            "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8, sliding_window=8, sliding_window_pattern=2
        ),
        inputs=text,
    ),
    "mistral": causal("Mistral", **GROUPED, sliding_window=8),
    "gpt-oss": causal("GptOss", **MOE, head_dim=8, num_local_experts=4, sliding_window=8),
    "deepseek-v3": causal("DeepseekV3", **DEEPSEEK),
    "gpt2": Kind(
        build=of_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=3,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        inputs=text,
    ),
    "bert": Kind(build=of_transformers("BertForMaskedLM", "BertConfig", **SMALL), inputs=text),
    "t5": Kind(
        build=of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=32,
            d_ff=64,
            d_kv=8,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        inputs=text,
        regions=6,
    ),
    "whisper": Kind(
        build=of_transformers("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        inputs=whisper_inputs,
        regions=6,
    ),
    "vit": Kind(
        build=of_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            **{name: value for name, value in SMALL.items() if name != "vocab_size"},
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.1,
        ),
        inputs=functools.partial(labelled, "pixel_values"),
    ),
    "clip": Kind(
        build=clip,
        inputs=lambda: {"input_ids": tokens(), "pixel_values": images(), "return_loss": True},
        regions=6,
    ),
    "mamba": causal("Mamba", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=3),
    "lora": Kind(build=lora, inputs=text),
    "unet": Kind(
        build=unet,
        inputs=lambda: noisy(encoder_hidden_states=torch.ones(BATCH, 5, 16)),
        loss=squared,
        has_switch=False,  # its own leaves blocks out
        regions=20,
    ),
    "autoencoder": Kind(build=autoencoder, inputs=lambda: {"sample": images(16)}, loss=squared, regions=14),
    "dit": Kind(build=dit, inputs=lambda: noisy(class_labels=torch.tensor([1, 2])), loss=squared),
    "resnet": by_hand(vision.resnet, 6),
    "convnext": by_hand(vision.convnext, 6),
    "densenet": by_hand(vision.densenet, 8),
    "swin": by_hand(vision.swin, 4),
}
