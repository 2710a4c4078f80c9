"""Small models of Transformers with random weights, and tokens for them."""

from collections.abc import Callable
from typing import Any

import torch

TOKENS = torch.arange(84).reshape(12, 7) * 5 % 32


def transformers_models() -> dict[str, Callable[[], Any]]:
    import transformers as hf

    small: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    layers: Any = {"num_hidden_layers": 3}
    experts: Any = {"num_key_value_heads": 2, "num_local_experts": 4}
    shape: Any = {"vocab_size": 32, "d_model": 16, "d_ff": 32, "num_layers": 3, "num_heads": 2, "d_kv": 8}
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small, **layers)),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small, **layers)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**small, **layers, **experts)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**shape, use_cache=False, decoder_start_token_id=0)),
    }
