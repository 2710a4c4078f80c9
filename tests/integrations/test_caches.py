"""Caches of keys and values: models of Transformers train with their default arguments, and still generate."""

import copy
import gc
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect import Decision
from recollect._apply.blocks import find_blocks
from recollect._profile.memory import LiveBytes
from recollect.compat import apply_activation_checkpointing, checkpoint_wrapper
from recollect.compat.composable import checkpoint as composable_checkpoint
from tests.integrations.small_models import BUILDERS, TOKENS, batch, build

# What Transformers warns about is its own.
pytestmark = pytest.mark.filterwarnings("ignore")


def built(name: str) -> Any:
    try:
        return build(name)
    except ModuleNotFoundError:  # Gemma3n asks for timm where that is installed, and timm for torchvision
        pytest.skip(f"the parts of {name} cannot be loaded here")


def gradients(model: Any, name: str, call: Any = None, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    (model if call is None else call)(**batch(name), **options).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("options", [{}, {"rules": "selective"}, {"every": 2}], ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_models_train_with_their_default_arguments(name: str, options: dict[str, Any]) -> None:
    model = built(name)
    expected = gradients(model, name, use_cache=False)
    with recollect.apply(model, **options):
        for _ in range(2):
            assert_equal(gradients(model, name), expected)
        assert getattr(model(**batch(name)), "past_key_values", None) is None
    assert not any("forward" in vars(module) for module in model.modules())


def peak_of_step(model: Any, name: str) -> int:
    for _ in range(2):
        model(**batch(name)).loss.backward()
        model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes() as meter:
        model(**batch(name)).loss.backward()
    return meter.peak_bytes


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_the_peak_is_no_higher_than_with_the_switch_of_transformers(name: str, every: int) -> None:
    theirs, ours = build(name), build(name)
    theirs.gradient_checkpointing_enable(every_n_layers=every)
    recollect.apply(ours, every=every)
    assert peak_of_step(ours, name) <= peak_of_step(theirs, name)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "t5"])
def test_generation_between_steps_keeps_its_cache_in_train_mode(name: str) -> None:
    model = build(name)
    options: Any = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    torch.manual_seed(2)
    expected = model.generate(TOKENS[:, :4], **options)
    with recollect.apply(model):
        gradients(model, name)
        torch.manual_seed(2)
        found = model.generate(TOKENS[:, :4], **options)
        gradients(model, name)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() > 0


def wrap_in_modules(model: Any) -> None:
    blocks = find_blocks(model)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: module in blocks
    )


def wrap_by_hooks(model: Any) -> None:
    for block in find_blocks(model):
        composable_checkpoint(block)


def wrap_forwards(model: Any) -> None:
    for block in find_blocks(model):
        block.forward = recollect.checkpoint(block.forward)


def apply_to_list(model: Any) -> None:
    recollect.apply(model.model.layers)


def apply_to_each(model: Any) -> None:
    for layer in model.model.layers[1:]:
        recollect.apply(layer, {lambda module, layer=layer: module is layer: Decision.RECOMPUTE})


@pytest.mark.parametrize("wrap", [wrap_in_modules, wrap_by_hooks, wrap_forwards, apply_to_list, apply_to_each])
@pytest.mark.parametrize("name", ["mistral", "llama"])
def test_regions_that_do_not_know_the_model_fill_no_cache(name: str, wrap: Callable[[Any], None]) -> None:
    model = build(name)
    expected = gradients(model, name, use_cache=False)
    wrap(model)
    assert_equal(gradients(model, name), expected)
    filled = model(**batch(name)).past_key_values
    assert [layer.is_initialized for layer in filled.layers] == [wrap is apply_to_each, False, False, False]


@pytest.mark.parametrize("wrap", [wrap_in_modules, wrap_by_hooks])
def test_decoders_of_an_encoder_fill_no_cache_in_wrappers(wrap: Callable[[Any], None]) -> None:
    model = build("whisper")
    expected = gradients(model, "whisper", use_cache=False)
    wrap(model)
    assert_equal(gradients(model, "whisper"), expected)


def test_a_compiled_model_fills_no_cache() -> None:
    torch.compiler.reset()  # torch cannot say why it compiles again what a trainer has compiled before
    model = build("mistral", layers=2)
    expected = gradients(model, "mistral", use_cache=False)
    with recollect.apply(model):
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_equal(gradients(model, "mistral", compiled), expected)
        assert compiled(**batch("mistral")).past_key_values is None


def test_in_eval_mode_a_loss_fills_no_cache_and_anything_else_does() -> None:
    model = build("llama").eval()
    expected = gradients(model, "llama", use_cache=False)
    with recollect.apply(model):
        assert_equal(gradients(model, "llama"), expected)
        assert model(input_ids=TOKENS).past_key_values.get_seq_length() == TOKENS.shape[1]
        model.train()
        with torch.no_grad():
            assert model(input_ids=TOKENS).past_key_values.get_seq_length() == TOKENS.shape[1]
        assert model(input_ids=TOKENS).past_key_values is None


def test_a_cache_that_holds_a_prefix_stays() -> None:
    """As in prefix tuning: without it the result would be another one."""
    model = build("llama")
    with torch.no_grad():
        prefix = model(input_ids=TOKENS[:, :3]).past_key_values
        expected = model(input_ids=TOKENS, past_key_values=copy.deepcopy(prefix)).logits
    with recollect.apply(model):
        assert torch.equal(model(input_ids=TOKENS, past_key_values=copy.deepcopy(prefix)).logits, expected)
    wrap_in_modules(model)
    assert torch.equal(model(input_ids=TOKENS, past_key_values=prefix).logits, expected)


def test_use_cache_and_labels_count_by_position_too() -> None:
    model = build("llama")
    with recollect.apply(model):
        assert model(TOKENS, None, None, None, None, None, True).past_key_values is None
        model.eval()
        assert model(TOKENS, None, None, None, None, TOKENS, True).past_key_values is None
        assert model(TOKENS, None, None, None, None, None, True).past_key_values is not None


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    with caplog.at_level(logging.INFO, logger="recollect"), recollect.apply(model) as handle:
        note = "LlamaForCausalLM does not fill a key/value cache in training; generate() still does."
        assert str(handle).endswith(note)
        assert [record.message.count("cache") for record in caplog.records] == [1]
        caplog.clear()
        for _ in range(3):
            gradients(model, "llama")
        assert not caplog.records
        for _ in range(3):
            gradients(model, "llama", use_cache=True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "LlamaForCausalLM was asked for a key/value cache, but does not fill one in training"


def test_copies_switch_too_and_pickled_models_are_plain() -> None:
    model = build("mistral")
    expected = gradients(model, "mistral", use_cache=False)
    recollect.apply(model)
    twin = copy.deepcopy(model)
    recollect.remove(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_equal(gradients(twin, "mistral"), expected)
    assert b"recollect" not in pickle.dumps(twin)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not any("forward" in vars(module) for module in loaded.modules())
    recollect.remove(twin)
    assert not any("forward" in vars(module) for module in twin.modules())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_handles_are_removed_in_any_order(order: tuple[int, int]) -> None:
    model = build("mistral")
    expected = gradients(model, "mistral", use_cache=False)
    handles = [recollect.apply(model, {f"model.layers.{n}": Decision.RECOMPUTE}) for n in range(2)]
    handles[order[0]].remove()
    assert_equal(gradients(model, "mistral"), expected)
    handles[order[1]].remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_inside_a_region_is_switched_before_it() -> None:
    model = build("t5")
    expected = gradients(model, "t5", use_cache=False)
    with recollect.apply(model, {"decoder": Decision.RECOMPUTE}):
        assert_equal(gradients(model, "t5"), expected)
        twin = copy.deepcopy(model)
        assert b"recollect" not in pickle.dumps(model)
        assert_equal(gradients(model, "t5"), expected)
    assert_equal(gradients(twin, "t5"), expected)
    assert not any("forward" in vars(module) for module in model.modules())
