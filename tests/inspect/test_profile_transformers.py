"""Real classes of Transformers, with default arguments: profiled, dry too, and as an ordinary forward leaves them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recollect

transformers = pytest.importorskip("transformers")


def tokens() -> dict[str, Any]:
    ids = torch.arange(32).reshape(2, 16) % 64
    return {"input_ids": ids, "labels": ids}


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen3_moe() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Qwen3MoeConfig(
        **_SMALL, moe_intermediate_size=16, head_dim=8, num_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return transformers.Qwen3MoeForCausalLM(config), tokens()


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SMALL, num_local_experts=4)), tokens()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), tokens()


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 32))
    }
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **heads,
        **sizes,
    )
    labels = tokens()["labels"]
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.ones(2, 8, 32),
        "labels": labels,
    }


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), tokens()


LONG = [pytest.param(make, marks=pytest.mark.long) for make in (mixtral, whisper)]  # tests/zoo has them, with regions


@pytest.mark.parametrize("make", [qwen3_moe, t5, gpt2, *LONG], ids=lambda make: str(make.__name__))
def test_a_dry_profile_is_the_real_one(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    model, batch = make()
    real = recollect.profile(model, kwargs=batch)
    dry = recollect.profile(model, kwargs=batch, dry=True)
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)
    assert recollect.profile(model, kwargs=batch, dry=True, device="H200").step_s


@pytest.mark.parametrize("dry", [False, True])
def test_what_a_model_collects_is_whole_after_a_profile(dry: bool) -> None:
    torch.manual_seed(0)
    model, batch = qwen3_moe()
    plain, _ = qwen3_moe()
    plain.load_state_dict(model.state_dict())
    recollect.profile(model, kwargs=batch, dry=dry)
    for wanted in ({}, {"output_hidden_states": True}):
        ours, theirs = model(**batch, **wanted), plain(**batch, **wanted)
        assert torch.equal(ours.loss, theirs.loss)
        assert len(ours.router_logits) == len(theirs.router_logits) == 2
        assert len(ours.hidden_states or ()) == len(theirs.hidden_states or ())


@pytest.mark.parametrize("dry", [False, True])
def test_a_batch_is_spread_over_the_arguments_that_it_names(dry: bool) -> None:
    model, batch = mixtral()
    found = recollect.profile(model, batch, dry=dry, timed=False)
    assert found.peak_bytes == recollect.profile(model, kwargs=batch, dry=dry, timed=False).peak_bytes
