"""fit on models of Transformers: dict batches, losses of the models' own, budgets, levers."""

from typing import Any

import pytest
import torch

import recollect
from recollect._core.levers import PlannedLever
from recollect._levers.lazy_logits import LazyLogits

pytest.importorskip("scipy")
pytest.importorskip("transformers")

from tests.timing import with_fixed_times
from tests.transformers_models import TOKENS, transformers_models

NAMES = ("llama", "gpt2", "t5", "bert")


def build(name: str) -> Any:
    torch.manual_seed(0)
    return transformers_models()[name]().train()


def run(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return output, grads


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_a_tokenizer_is_enough(name: str) -> None:
    from transformers import BatchEncoding

    model = build(name)
    batch = BatchEncoding({"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "labels": TOKENS})
    plain = run(model, dict(batch))[1]
    with recollect.fit(model, batch, optimizer=torch.optim.AdamW, budget="min") as fitted:
        forecast = fitted.plan.forecast
        assert forecast is not None
        assert forecast.peak_bytes < forecast.plain_peak_bytes
        grads = run(model, dict(batch))[1]
    assert grads.keys() == plain.keys()
    assert all(torch.equal(grads[key], plain[key]) for key in plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_language_model_is_computed_in_chunks(name: str) -> None:
    model, batch = build(name), {"input_ids": TOKENS, "labels": TOKENS}
    head = "cls.predictions.decoder" if name == "bert" else "lm_head"
    plain = run(model, batch)
    lever = recollect.Plan(levers=(PlannedLever(name="chunked_loss", paths=(head,), parts=3),))
    with recollect.apply(model, lever):
        found = run(model, batch)
        assert isinstance(found[0].logits, LazyLogits)
    torch.testing.assert_close(found[0].loss, plain[0].loss)
    torch.testing.assert_close(found[0].logits.compute(), plain[0].logits)
    for key, grad in plain[1].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-4, atol=1e-6)


def test_plans_are_made_for_the_step_without_a_cache_which_regions_do_not_fill() -> None:
    import transformers as hf

    shape: Any = {"vocab_size": 32, "d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8}
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(**shape, decoder_start_token_id=0)).train()
    batch = {"input_ids": TOKENS, "labels": TOKENS}

    def step() -> None:
        model(**batch).loss.backward()

    seen = recollect.profile(step)
    assert seen.under_regions is not None
    assert len(seen.under_regions.calls) != len(seen.calls)
    assert not any("forward" in vars(module) for module in model.modules())
    again = with_fixed_times(recollect.Profile.from_json(seen.to_json()))
    plan = recollect.plan(again, budget=int(seen.peak_bytes * 0.6))
    with recollect.apply(model, plan):
        measured = recollect.profile(step)
    assert measured.peak_bytes <= seen.peak_bytes * 0.6
    assert measured.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert recollect.plan(seen, budget="fastest").peak_bytes == seen.peak_bytes
