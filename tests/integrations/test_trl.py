"""Supervised fine-tuning by TRL, with the real package: the same parameters afterwards, to the bit."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect
import recollect.compat
from recollect.integrations.transformers import RecollectCallback, enable
from tests.integrations.small_models import TOKENS, build

trl = pytest.importorskip("trl", reason="trl is not installed")

# What these packages warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
SELECTIVE = {"gradient_checkpointing_kwargs": {"selective": True}}


def tokenizer() -> Any:
    """As little as fine-tuning on tokens asks for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(30)} | {"<pad>": 30, "<eos>": 31}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def sentences() -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    rows = {"input_ids": [((TOKENS[0] + n) % 32).tolist() for n in range(8)]}
    # A fingerprint of its own is a pickle, which some versions cannot make.
    return Dataset(InMemoryTable.from_pydict(rows), fingerprint="rows")


def fine_tune(
    folder: Path,
    *callbacks: Any,
    adapters: bool = False,
    prepare: Callable[[Any], Any] = lambda model: None,
    **how: Any,
) -> Any:
    """The model after three steps, as the trainer has it; TRL's own switch is on unless it is said otherwise."""
    from peft import LoraConfig

    model = build("llama")
    prepare(model)
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, max_length=None, bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True}, **how,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=sentences(),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if adapters else None,
    )
    trainer.train()
    return trainer.model


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "adapters"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, list[torch.Tensor]]:
    """Whether only adapters are trained, and the parameters after plain training."""
    model = fine_tune(tmp_path_factory.mktemp("plain"), adapters=request.param, gradient_checkpointing=False)
    return request.param, list(model.parameters())


def assert_plain(model: Any, plain: tuple[bool, list[torch.Tensor]]) -> None:
    assert all(map(torch.equal, model.parameters(), plain[1]))


def is_region(module: torch.nn.Module) -> bool:
    return type(vars(module).get("forward")).__name__ == "StandIn"


@pytest.mark.parametrize("options", [{}, {"policy": "selective"}, {"budget": "min"}], ids=str)
def test_the_callback_takes_the_place_of_the_switch_that_trl_turns_on(
    options: dict[str, Any], plain: tuple[bool, list[torch.Tensor]], tmp_path: Path
) -> None:
    model = fine_tune(tmp_path, RecollectCallback(**options), adapters=plain[0])
    assert_plain(model, plain)
    assert not any(map(is_region, model.modules()))


def test_a_model_that_is_enabled_beforehand_is_fine_tuned(
    plain: tuple[bool, list[torch.Tensor]], tmp_path: Path
) -> None:
    model = fine_tune(tmp_path, adapters=plain[0], prepare=enable, gradient_checkpointing=False)
    assert_plain(model, plain)
    assert sum(map(is_region, model.modules())) == 4


@pytest.mark.parametrize("how", [{}, SELECTIVE], ids=["full", "selective"])
def test_the_switch_of_trl_runs_on_our_engine_after_install(
    how: dict[str, Any], plain: tuple[bool, list[torch.Tensor]], tmp_path: Path
) -> None:
    seen = []

    def watch(model: Any) -> None:
        model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(recollect.is_recomputing()))

    with recollect.compat.install():
        assert_plain(fine_tune(tmp_path, adapters=plain[0], prepare=watch, **how), plain)
    assert seen.count(True) == seen.count(False) == 3


def test_the_example_fine_tunes_within_a_budget(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    example = load_example()
    monkeypatch.setattr("sys.argv", ["fine_tune.py", "--steps", "2", "--layers", "2"])
    example.main()
    said = capfd.readouterr().out
    assert "regions in PeftModel" in said
    assert said.count("'loss'") == 2


def test_the_example_says_which_package_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match=r"this example needs trl and peft, which cannot be imported \(.*pip install"):
        load_example()


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("fine_tune", ROOT / "examples" / "fine_tune.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example
