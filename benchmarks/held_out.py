"""Models that no rule of the profiler was fitted on: Transformers' own classes from small configs, and an LSTM.

Each as a `Case`, whose model takes its inputs and gives its loss; launch-bound ones are marked by their names' end.
Sizes are for a large device; `small=True` for smoke tests on a CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect._bench.cases import Case


class WithLoss(nn.Module):
    """A model of Transformers that is given its inputs in order and gives its loss."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).loss
        return loss


class LSTM(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(vocab, width), nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(tokens))[0])
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _tokens(vocab: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocab, shape), torch.randint(0, vocab, shape))


_CAUSAL = ("input_ids", "labels")


def gpt2(width: int, layers: int, vocab: int = 50257) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=max(width // 64, 2))
    return WithLoss(GPT2LMHeadModel(config), _CAUSAL)


def qwen3(width: int, layers: int, vocab: int = 32000) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(width // 128, 2)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
    )
    return WithLoss(Qwen3ForCausalLM(config), _CAUSAL)


def mixtral(width: int, layers: int, vocab: int = 32000) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    heads = max(width // 64, 2)
    config = MixtralConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
    )
    return WithLoss(MixtralForCausalLM(config), _CAUSAL)


def t5(width: int, layers: int, vocab: int = 32128) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocab,
        d_model=width,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=max(width // 64, 2),
        decoder_start_token_id=0,
    )
    return WithLoss(T5ForConditionalGeneration(config), _CAUSAL)


def whisper(width: int, layers: int, frames: int = 3000, vocab: int = 51865) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    heads = max(width // 64, 2)
    config = WhisperConfig(
        vocab_size=vocab,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WithLoss(WhisperForConditionalGeneration(config), ("input_features", "labels"))


def vit(width: int, layers: int, side: int = 224) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 2),
        intermediate_size=4 * width,
        image_size=side,
        num_labels=10,
    )
    return WithLoss(ViTForImageClassification(config), ("pixel_values", "labels"))


def _pictures(count: int, side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(count, 3, side, side), torch.randint(0, 10, (count,)))


def _sounds(count: int, frames: int, tokens: int, vocab: int = 51865) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(count, 80, frames), torch.randint(3, vocab, (count, tokens)))


HALF = torch.bfloat16

CASES: dict[str, Case] = {
    "GPT-2": Case(build=lambda: gpt2(1024, 16), inputs=_tokens(50257, 6, 1024), dtype=HALF),
    "GPT-2, launches": Case(build=lambda: gpt2(768, 12), inputs=_tokens(50257, 1, 256), dtype=HALF),
    "Qwen3": Case(build=lambda: qwen3(2048, 14), inputs=_tokens(32000, 4, 4096), dtype=HALF),
    "Qwen3, launches": Case(build=lambda: qwen3(1024, 16), inputs=_tokens(32000, 1, 512), dtype=HALF),
    "Mixtral": Case(build=lambda: mixtral(1024, 8), inputs=_tokens(32000, 8, 2048), dtype=HALF),
    "Mixtral, launches": Case(build=lambda: mixtral(512, 8), inputs=_tokens(32000, 1, 512), dtype=HALF),
    "T5": Case(build=lambda: t5(768, 8), inputs=_tokens(32128, 16, 512), autocast=HALF),
    "Whisper": Case(build=lambda: whisper(768, 8), inputs=_sounds(8, 3000, 256), autocast=HALF),
    "ViT": Case(build=lambda: vit(768, 12), inputs=_pictures(64, 224), autocast=HALF),
    "LSTM": Case(build=lambda: LSTM(8000, 1024, 2), inputs=_tokens(8000, 32, 256)),
}

SMALL: dict[str, Case] = {
    "GPT-2": Case(build=lambda: gpt2(128, 4, 500), inputs=_tokens(500, 2, 64)),
    "Qwen3": Case(build=lambda: qwen3(128, 4, 500), inputs=_tokens(500, 2, 64)),
    "Mixtral": Case(build=lambda: mixtral(128, 2, 500), inputs=_tokens(500, 2, 64)),
    "T5": Case(build=lambda: t5(128, 2, 500), inputs=_tokens(500, 2, 64)),
    "Whisper": Case(build=lambda: whisper(128, 2, 200, 500), inputs=_sounds(2, 200, 32, 500)),
    "ViT": Case(build=lambda: vit(128, 2, 64), inputs=_pictures(2, 64)),
    "LSTM": Case(build=lambda: LSTM(500, 128, 2), inputs=_tokens(500, 4, 32)),
}
