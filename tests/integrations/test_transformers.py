"""`enable` and the callback, with the real packages: Transformers, its Trainer and PEFT."""

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import recollect
from recollect.integrations.transformers import RecollectCallback, enable
from tests.integrations.small_models import TOKENS, batch, build

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(model: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**batch("llama"), **options).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_enable_takes_the_place_of_the_own_switch() -> None:
    model = build("llama")
    expected = gradients(model, use_cache=False)
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match=r"own gradient checkpointing is also on for 4 of the r.*recomputed twice"):
        recollect.apply(model).remove()
    with enable(model) as handle:
        assert not model.is_gradient_checkpointing
        assert len(handle.places) == 4
        assert all(map(torch.equal, gradients(model), expected))


def test_layers_that_the_own_switch_recomputes_beside_the_blocks_are_regions_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
    )
    with recollect.apply(transformers.Wav2Vec2Model(config)) as handle:
        names = [place.name for place in handle.places]
    assert names == [
        *(f"feature_extractor.conv_layers.{number}" for number in range(2)),
        *(f"encoder.layers.{number}" for number in range(2)),
    ]


def test_a_budget_is_kept() -> None:
    model = build("llama")
    expected = gradients(model, use_cache=False)
    model.zero_grad()
    inputs = batch("llama")
    plain = recollect.profile(model, kwargs={**inputs, "use_cache": False}, dry=True)
    smallest = recollect.plan(plain, budget="min").peak_bytes
    limit = (plain.peak_bytes + smallest) // 2
    with enable(model, budget=limit, inputs=inputs) as handle:
        assert handle.places
        assert recollect.profile(model, kwargs=inputs, dry=True).peak_bytes <= limit
        assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "1GiB"}, r"budget='1GiB' needs inputs=, a batch to call the model with"),
        ({"budget": "1GiB", "policy": "full", "every": 2}, r"so it cannot be combined with policy, every"),
        (
            {"optimizer": torch.optim.SGD, "tiers": "host"},
            r"optimizer, tiers: only used with budget=, which is missing",
        ),
        ({"budget": "1GiB", "inputs": TOKENS}, r"inputs= expects a batch by name, .* not Tensor"),
    ],
)
def test_a_budget_without_what_it_needs_is_refused(options: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        enable(build("llama"), **options)


def test_the_callback_refuses_options_before_training_begins() -> None:
    with pytest.raises(ValueError, match=r"budget='1GiB' decides what to keep, so it cannot be combined with policy"):
        RecollectCallback(budget="1GiB", policy="full")
    with pytest.raises(ValueError, match=r"tiers: only used with budget=, which is missing"):
        RecollectCallback(tiers="host")
    with pytest.raises(TypeError, match=r"RecollectCallback has no option use_reentrant=False: leave it out"):
        RecollectCallback(use_reentrant=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "name"), [(torch.nn.Linear(1, 1), "Linear"), ("llama", "str")])
def test_a_model_of_another_kind_is_sent_to_apply(model: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} neither is nor holds one; for other models use recollect\.apply"):
        enable(model)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("rules", ["full", "selective"])
def test_adapters_train_on_a_frozen_base_wrapped_before_or_after(order: str, rules: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    plain = get_peft_model(build("llama"), config)
    expected = gradients(plain, use_cache=False)
    torch.manual_seed(0)
    model = build("llama")
    if order == "before":
        enable(model, rules)
    wrapped = get_peft_model(model, config)
    if order == "after":
        handle = enable(wrapped, rules)
        assert [place.name for place in handle.places] == [f"base_model.model.model.layers.{n}" for n in range(4)]
    wrapped.load_state_dict(plain.state_dict())
    found = gradients(wrapped)
    assert len(found) == len(expected) == 16
    assert all(map(torch.equal, found, expected))
    assert all(p.grad is None for name, p in wrapped.named_parameters() if "lora" not in name)


@pytest.mark.parametrize("kind", ["adapters", "prompt", "prefix"])
def test_a_budget_is_for_the_model_with_what_peft_adds(kind: str) -> None:
    """Prompts are made by PEFT's wrapper: the model inside has nothing to train."""
    from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

    configs: dict[str, Any] = {
        "adapters": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    model = get_peft_model(build("llama"), configs[kind])
    expected = gradients(model, **({} if kind == "prefix" else {"use_cache": False}))
    assert expected
    with enable(model, budget="min", inputs=batch("llama")) as handle:
        assert handle.places
        assert all(place.name.startswith("base_model.") for place in handle.places)
        assert all(map(torch.equal, gradients(model), expected))


def test_a_budget_is_for_the_whole_model_that_holds_one_of_transformers() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = build("llama").model
            self.head = torch.nn.Linear(16, 3)

        def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
            last = self.backbone(input_ids=tokens).last_hidden_state[:, -1]
            return torch.nn.functional.cross_entropy(self.head(last), kinds)

    model = Classifier().train()
    inputs = {"tokens": TOKENS, "kinds": torch.tensor([0, 2])}
    model(**inputs).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with enable(model, budget="min", inputs=inputs) as handle:
        assert any(place.name.startswith("backbone.layers.") for place in handle.places)
        model(**inputs).backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters() if p.grad is not None], expected))


def test_the_state_of_the_optimizer_counts() -> None:
    model = build("llama")
    inputs = {**batch("llama"), "use_cache": False}
    plain = recollect.profile(model, kwargs=inputs, dry=True).peak_bytes
    enable(model, budget=plain, inputs=batch("llama")).remove()
    with pytest.raises(recollect.BudgetError, match="no plan fits"):
        enable(model, budget=plain, inputs=batch("llama"), optimizer=torch.optim.AdamW)


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        row = (TOKENS[0] + index) % 32
        return {"input_ids": row, "labels": row}


def train(model: Any, tmp_path: Path, callbacks: list[Any], data: Any = None, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data or Sentences(), callbacks=callbacks)
    trainer.train()


@pytest.mark.parametrize(
    "options", [{}, {"policy": "selective"}, {"budget": "min"}, {"own": True}, {"torch_compile": True}], ids=str
)
def test_the_trainer_trains_as_without_the_callback(options: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, so that random numbers count, and the batch that a budget looks at."""
    is_compiled = options.pop("torch_compile", False)
    own: Any = {"gradient_checkpointing": True} if options.pop("own", False) else {}
    if is_compiled:
        own = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    models = []
    for callbacks in ([], [RecollectCallback(**options)]):
        model = build("llama", layers=2) if is_compiled else build("gpt2")  # each layer is traced for itself
        seen: list[int] = []
        counts = Count(seen)
        train(model, tmp_path, [*callbacks, counts], **(own if callbacks or is_compiled else {}))
        assert bool(seen.pop()) == bool(callbacks)  # a plan may leave layers out
        assert not any("forward" in vars(module) for module in model.modules())
        models.append(model)
    assert all(map(torch.equal, *(list(model.parameters()) for model in models)))


class Count(RecollectCallback):
    """Counts the regions when training begins, after the one it stands behind."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self._seen = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del args, state, control
        modules = given["model"].modules()
        self._seen.append(sum(type(vars(module).get("forward")).__name__ == "StandIn" for module in modules))


def test_a_stream_of_data_needs_a_batch_for_a_budget(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Sentences()[n] for n in range(8)])

    with pytest.raises(ValueError, match=r"budget= needs inputs=, a batch: the training data is a stream"):
        train(build("gpt2"), tmp_path, [RecollectCallback(budget="min")], Stream())
    model = build("gpt2")
    train(model, tmp_path, [RecollectCallback(budget="min", inputs=batch("gpt2"))], Stream())


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_without_the_package_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f"recollect.integrations.{name}"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    for missing in (name, f"{name}.hooks"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(ours)
    assert f"{ours} needs {name}, which cannot be imported" in str(raised.value)
    assert f'Run: pip install "recollect[{name}]"' in str(raised.value)


def test_a_copy_of_an_enabled_model_trains_too() -> None:
    model = build("llama")
    expected = gradients(model, use_cache=False)
    enable(model)
    assert all(map(torch.equal, gradients(copy.deepcopy(model)), expected))
