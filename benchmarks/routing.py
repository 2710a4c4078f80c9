"""Whether steps stay within their budget where a router sends other tokens to other experts at each step.

    python benchmarks/routing.py --shares 35 50 70 --steps 30

Small models of Transformers on the CPU, fitted once for each budget (a share of the whole plain peak), then trained on
new tokens at each step.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import recollect
from recollect._profile.memory import LiveBytes

WIDTH, LAYERS, EXPERTS, TOKENS, BATCH, VOCAB = 64, 4, 8, 128, 4, 256
Build = Callable[[], nn.Module]


def shape(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **more,
    }


def of(name: str, config: str, **options: Any) -> Build:
    def build() -> nn.Module:
        import transformers

        made: Any = getattr(transformers, name)(getattr(transformers, config)(**options))
        made.set_experts_implementation("eager") if hasattr(made, "set_experts_implementation") else None
        trained: nn.Module = made.train()
        return trained

    return build


MODELS: dict[str, Build] = {
    "Mixtral": of("MixtralForCausalLM", "MixtralConfig", **shape(num_local_experts=EXPERTS)),
    "Qwen3-MoE": of(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **shape(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=WIDTH, head_dim=16),
    ),
    "JetMoe": of("JetMoeForCausalLM", "JetMoeConfig", **shape(num_local_experts=EXPERTS, kv_channels=16)),
    "Switch": of(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=16,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=4,
        num_experts=EXPERTS,
        num_sparse_encoder_layers=LAYERS,
        num_sparse_decoder_layers=LAYERS,
        decoder_start_token_id=0,
    ),
}


def make_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


def run(name: str, shares: list[int], steps: int) -> tuple[int, int]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fit_batch = make_batch()
    plain = recollect.profile(model, kwargs=fit_batch, optimizer=optimizer, timed=False).peak_bytes
    over = total = 0
    for share in shares:
        budget = plain * share // 100
        try:
            fitted = recollect.fit(model, fit_batch, optimizer=optimizer, budget=budget)
        except recollect.BudgetError as error:
            print(f"{name} {share}%: refused: {str(error).splitlines()[0]}", flush=True)
            continue
        most = 0
        for _ in range(steps):
            batch = make_batch()
            states = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
            with LiveBytes(include=[model, *batch.values(), *states]) as meter:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            most = max(most, meter.peak_bytes)
            over += meter.peak_bytes > budget
            total += 1
        print(f"{name} {share}%: {steps} steps, at most {100 * most / budget:.1f}% of the budget", flush=True)
        fitted.remove()
    return over, total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--shares", type=int, nargs="+", default=[35, 50, 70])
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results = [run(name, asked.shares, asked.steps) for name in asked.models]
    print(
        f"{sum(over for over, _ in results)} of {sum(total for _, total in results)} steps took more than their budget"
    )


if __name__ == "__main__":
    main()
