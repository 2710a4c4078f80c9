"""Models of Transformers, and trainers that know nothing of us: the same training, to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import recollect
from recollect import Decision
from tests.models import GPT
from tests.transformers_models import TOKENS, transformers_models

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(model: Any) -> list[Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral", "t5"])
@pytest.mark.parametrize("rules", ["full", "selective"])
def test_layers_of_transformers_are_found_and_recomputed(kind: str, rules: str) -> None:
    torch.manual_seed(0)
    model = transformers_models()[kind]().train()
    expected = gradients(model)
    with recollect.apply(model, rules) as handle:
        assert len(handle.places) == (6 if kind == "t5" else 3)
        for _ in range(2):
            for found, wanted in zip(gradients(model), expected, strict=True):
                assert (found is None and wanted is None) or torch.equal(found, wanted)  # type: ignore[arg-type]


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


def weights(model: nn.Module) -> Iterator[Tensor]:
    return (p.detach().clone() for p in model.parameters())


@pytest.mark.parametrize("rules", ["full", "selective"])
def test_complaint_43_the_trainer_of_transformers_trains_alike(rules: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    found = []
    for chosen in (None, rules):
        torch.manual_seed(0)
        model = transformers_models()["gpt2"]()
        handle = None if chosen is None else recollect.apply(model, chosen)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
        if handle is not None:
            handle.remove()
        assert not any("forward" in vars(layer) for layer in model.transformer.h)
        found.append(list(weights(model)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("rules", ["full", "selective"])
def test_complaint_43_lightning_trains_alike(rules: str, tmp_path: Path) -> None:
    import lightning

    class Task(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT()

        def training_step(self, tokens: Tensor) -> Tensor:
            result: Tensor = nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
            return result

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    found = []
    for chosen in (None, rules):
        torch.manual_seed(0)
        task = Task()
        handle = None if chosen is None else recollect.apply(task, chosen)
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        torch.manual_seed(1)
        trainer.fit(task, DataLoader(TOKENS, batch_size=3))  # type: ignore[arg-type]
        if handle is not None:
            assert [place.name for place in handle.places] == [f"net.layers.{n}" for n in range(4)]
            handle.remove()
        found.append(list(weights(task)))
    assert all(map(torch.equal, *found))


def test_frozen_weights_as_adapters_leave_them_do_not_matter() -> None:
    """Complaint 9 once more, with a model: adapters train although no input of a region requires grad."""
    expected = None
    for order in ("plain", "before", "after"):
        torch.manual_seed(0)
        model = GPT(dropout=0.0)
        if order == "before":
            recollect.apply(model)
        model.requires_grad_(requires_grad=False)
        adapters = [nn.Linear(16, 16) for _ in model.layers]
        for layer, adapter in zip(model.layers, adapters, strict=True):
            layer.attn.adapter = adapter  # type: ignore[union-attr]
            layer.attn.out.register_forward_hook(lambda _, args, out, adapter=adapter: out + adapter(args[0]))  # type: ignore[union-attr]
        if order == "after":
            recollect.apply(model, {"layers.*": Decision.RECOMPUTE})
        model(TOKENS).square().sum().backward()
        found = [p.grad for adapter in adapters for p in adapter.parameters()]
        expected = expected or found
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
