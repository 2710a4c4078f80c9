"""PEFT's methods that put hooks on layers for the time of one call: they are gone when backward recomputes."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import policies
from tests.zoo.catalogue import GROUPED, tokens

peft = pytest.importorskip("peft")


def adapted(method: str) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, use_cache=False))
    layers = ["q_proj", "v_proj", "down_proj"]
    config = (
        peft.LoraConfig(
            r=4,
            target_modules=layers,
            alora_invocation_tokens=[7, 14],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        if method == "activated LoRA"
        else peft.PolyConfig(r=4, target_modules=layers, n_tasks=2, n_skills=2, n_splits=1, task_type="CAUSAL_LM")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config).train()


def gradients(model: nn.Module, **more: Tensor) -> list[Tensor]:
    for seed in range(3):
        torch.manual_seed(seed)
        model(input_ids=tokens(), labels=tokens(), **more).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("method", ["activated LoRA", "Poly"])
@pytest.mark.parametrize("rule", ["full", "selective", policies.save_matmuls], ids=["full", "selective", "products"])
def test_gradients_are_those_of_the_plain_model(method: str, rule: Any) -> None:
    more = {"task_ids": torch.tensor([0, 1])} if method == "Poly" else {}
    plain, ours = adapted(method), adapted(method)
    recollect.apply(ours, rule)
    expected = gradients(plain, **more)
    assert expected
    assert all(map(torch.equal, expected, gradients(ours, **more)))
