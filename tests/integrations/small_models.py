"""Real classes of Transformers, built from small configs, with a batch for each; what is as given is their defaults."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

hf.logging.set_verbosity_error()

TOKENS = torch.arange(24).reshape(2, 12) * 5 % 32

_SMALL: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
_TEXT: Any = {**_SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2}
_BOTH: Any = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "head_dim": 8}
_EXPERTS: Any = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT: Any = {
    "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip
_SHARED: Any = {
    **_TEXT, **_BOTH, "hidden_size": 32, "head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 32, "pad_token_id": 31,
}  # fmt: skip
_PAIR: Any = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 0,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def _gemma3n() -> Any:
    sparse = {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    return hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(**_SHARED, **sparse))


BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_TEXT, **_BOTH)),
    "gemma3n": _gemma3n,
    "gemma4": lambda: hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**_SHARED, global_head_dim=16)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_TEXT, sliding_window=4)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**_TEXT, **_BOTH, **_EXPERTS)),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**_TEXT, **_LATENT)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=32, d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, decoder_start_token_id=0)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**_PAIR, num_mel_bins=4, max_source_positions=10, max_target_positions=20)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_PAIR, max_position_embeddings=20)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=4)
    ),
}


def build(name: str, *, layers: int | None = None) -> Any:
    """The model, in train mode, always with the same weights; of a decoder so many layers, if they are counted."""
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    if layers is not None:
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:layers], layers
    return model


def batch(name: str) -> dict[str, Any]:
    """What it is called with for a loss."""
    if name == "whisper":
        sound = torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(0))
        return {"input_features": sound, "labels": TOKENS}
    return {"input_ids": TOKENS, "labels": TOKENS}
