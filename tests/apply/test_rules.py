"""What rules mean, and what is said where they mean nothing."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect import Decision, compat, policies
from tests.models import GPT, MODELS, Block, Looped, MoE

RECOMPUTE, SAVE = Decision.RECOMPUTE, Decision.SAVE


def places(model: nn.Module, rules: Any = None, **options: Any) -> dict[str, str]:
    """What is applied where; the model is left as it was."""
    with recollect.apply(model, rules, **options) as handle:
        return {place.name: place.what for place in handle.places}


def regions(model: nn.Module, rules: Any = None, **options: Any) -> list[str]:
    return [name for name, what in places(model, rules, **options).items() if what.startswith("recompute")]


def test_a_star_stays_within_one_part() -> None:
    assert regions(GPT(), {"layers.*": RECOMPUTE}) == [f"layers.{n}" for n in range(4)]
    assert regions(GPT(layers=1), {"layers.**": RECOMPUTE})[:3] == ["layers.0", "layers.0.norm1", "layers.0.norm2"]
    assert regions(GPT(), {"**.attn": RECOMPUTE}) == [f"layers.{n}.attn" for n in range(4)]


def test_a_regular_expression_is_matched_as_a_whole() -> None:
    assert regions(GPT(), {r"re:layers\.[02]": RECOMPUTE}) == ["layers.0", "layers.2"]


def test_a_class_matches_its_instances() -> None:
    assert regions(GPT(), {Block: RECOMPUTE}) == [f"layers.{n}" for n in range(4)]
    assert len(regions(GPT(), {(nn.Linear, nn.LayerNorm): RECOMPUTE})) == 4 * 6 + 2
    assert regions(Block(8), {Block: RECOMPUTE}) == [""]


def test_a_predicate_is_asked_with_the_module_or_with_its_name_too() -> None:
    assert regions(GPT(), {lambda module: isinstance(module, Block): RECOMPUTE}) == [f"layers.{n}" for n in range(4)]
    assert regions(GPT(), {lambda name, module: name == "layers.2": RECOMPUTE}) == ["layers.2"]


def test_the_first_rule_that_matches_decides() -> None:
    rules = {"layers.0": SAVE, "layers.*": RECOMPUTE}
    assert places(GPT(layers=2), rules) == {"layers.0": "left as it is", "layers.1": "recompute"}


def test_a_rule_that_comes_too_late_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"rule 'layers.0' has no effect: earlier rules match all of its modules"):
        places(GPT(), {"layers.*": RECOMPUTE, "layers.0": SAVE})


def test_rules_for_inner_modules_compose_with_those_for_outer_ones() -> None:
    found = places(GPT(layers=1), {"layers.*": RECOMPUTE, "layers.*.attn": SAVE, "layers.*.mlp": policies.save_matmuls})
    assert found == {
        "layers.0": "recompute",
        "layers.0.attn": "save",
        "layers.0.mlp": "recompute under save_matmuls",
    }


def test_every_and_first_count_outermost_regions_in_the_models_order() -> None:
    model = GPT(layers=6)
    assert regions(model, every=2) == ["layers.0", "layers.2", "layers.4"]
    assert regions(model, "every:3") == ["layers.0", "layers.3"]
    assert regions(model, first=2) == ["layers.0", "layers.1"]
    assert regions(model, every=2, first=3) == ["layers.0", "layers.2"]
    nested = {"layers.*": RECOMPUTE, "layers.*.mlp": RECOMPUTE, "layers.*.attn": SAVE}
    assert list(places(model, nested, every=4)) == [
        *("layers.0", "layers.0.attn", "layers.0.mlp"),
        *("layers.4", "layers.4.attn", "layers.4.mlp"),
    ]
    assert regions(model, first=100) == [f"layers.{n}" for n in range(6)]


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        (None, "recompute"),
        ("full", "recompute"),
        ("selective", "recompute under selective"),
        (RECOMPUTE, "recompute"),
        (policies.save_matmuls, "recompute under save_matmuls"),
    ],
)
def test_without_names_repeated_blocks_are_meant(rules: Any, what: str) -> None:
    assert places(GPT(), rules) == dict.fromkeys((f"layers.{n}" for n in range(4)), what)


@pytest.mark.parametrize(
    ("kind", "blocks"),
    {
        "gpt": ["layers.0", "layers.1", "layers.2", "layers.3"],
        "moe": ["blocks.0", "blocks.1", "blocks.2"],
        "unet": ["down1", "down2", "middle", "up2", "up1"],
        "vit": ["encoder.0", "encoder.1", "encoder.2"],
        "stages": [*(f"stages.0.blocks.{n}" for n in range(2)), *(f"stages.1.blocks.{n}" for n in range(3))],
        "translator": [f"transformer.{half}.layers.{n}" for half in ("encoder", "decoder") for n in range(2)],
        "convolutional": ["0", "1", "3", "4"],
    }.items(),
)
def test_blocks_are_found(kind: str, blocks: list[str]) -> None:
    model, _ = MODELS[kind]()
    assert regions(model) == blocks


def test_selective_does_not_warn_where_a_model_has_no_attention() -> None:
    model, inputs = MODELS["unet"]()
    recollect.apply(model, "selective")
    model(*inputs).sum().backward()


def test_dense_layers_among_sparse_ones_are_blocks_too() -> None:
    model = MoE()
    block: Any = model.blocks[0]
    block.experts = block.experts[:1]
    assert regions(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_of_differing_sizes_are_no_stages_unless_they_hold_alike_blocks() -> None:
    def unit(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())

    class Inverted(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.body = nn.Sequential(unit(inputs, 4 * inputs), unit(4 * inputs, outputs))

        def forward(self, x: Any) -> Any:
            return self.body(x)

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Inverted(2, 4), Inverted(4, 4)))
    assert regions(model) == ["1.0", "1.1"]


def test_one_module_in_several_places_is_a_block() -> None:
    model = nn.Sequential(*[Block(8)] * 4)
    assert regions(model) == ["0"]


def test_a_list_of_one_block_is_enough() -> None:
    assert regions(GPT(layers=1)) == ["layers.0"]
    assert regions(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)) == ["encoder.layers.0", "decoder.layers.0"]


def test_recurrent_layers_in_a_list_are_blocks() -> None:
    assert regions(nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.LSTM(2, 2) for _ in range(2)))) == ["1.0", "1.1"]


def test_parts_that_are_only_called_the_same_are_no_blocks() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.critic = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())

    with pytest.raises(ValueError, match="Pair has no repeated blocks"):
        recollect.apply(Pair())


def test_lazy_models_have_blocks_too() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(2)))
    assert regions(model) == ["0", "1"]


def test_layers_that_are_parametrized_are_no_blocks() -> None:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.ReLU(), weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="Sequential has no repeated blocks"):
        recollect.apply(model)


def test_what_was_done_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="recollect"), recollect.apply(GPT()) as handle:
        assert caplog.messages == [str(handle)]


def test_the_handle_prints_a_table() -> None:
    rules: Any = {"layers.1.attn": SAVE, "layers.*": RECOMPUTE, nn.Embedding: {"early_stop": False}}
    with recollect.apply(GPT(layers=3), rules) as handle:
        assert (
            str(handle)
            == repr(handle)
            == """\
recollect.apply: 4 regions in GPT, 1 module kept
module         class      what                          rule
embed          Embedding  recompute (early_stop=False)  Embedding
layers.0-2     Block      recompute                     'layers.*'
layers.1.attn  Attention  save                          'layers.1.attn'"""
        )


def test_a_shared_module_is_found_by_each_of_its_names() -> None:
    shared = Block(8)
    model = nn.ModuleDict({"first": shared, "second": shared, "third": Block(8)})
    assert regions(model, {"second": RECOMPUTE}) == ["first"]
    assert regions(model, {"*": RECOMPUTE}) == ["first", "third"]


def test_modules_inside_themselves_are_no_trap() -> None:
    model = nn.Sequential(Block(8), Block(8))
    for block in model:
        block.parent = model
    assert regions(model, {"*": RECOMPUTE}) == ["0", "1"]
    assert regions(model) == ["0", "1"]


def test_modules_that_refer_to_each_other_are_listed_in_time() -> None:
    blocks = [nn.Module() for _ in range(24)]
    for index, block in enumerate(blocks):
        block.earlier = nn.ModuleList(blocks[:index])
    with pytest.raises(ValueError, match="matches no module of ModuleList"):
        recollect.apply(nn.ModuleList(blocks), {"nowhere": RECOMPUTE})


def test_a_module_itself_is_a_key() -> None:
    model = GPT()
    assert regions(model, {model.layers[2]: RECOMPUTE}) == ["layers.2"]


def test_names_may_hold_any_characters() -> None:
    model = nn.Sequential(nn.ModuleDict({"w[0]": nn.Linear(2, 2), "²": nn.Linear(2, 2)}))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model[0]

        def forward(self, x: Any) -> Any:
            for part in self.parts.values():  # type: ignore[operator]
                x = part(x).sin()
            return x

    both: Any = nn.Sequential(Both())
    handle = recollect.apply(both, {Both: RECOMPUTE, nn.Linear: SAVE})
    both(torch.ones(1, 2)).sum().backward()
    assert "0.parts.w[0]" in str(handle)


def test_what_several_regions_share_stays_with_those_that_stay() -> None:
    shared = nn.LayerNorm(8)

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = shared, nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.linear(self.norm(x))

    model = nn.Sequential(*(Sharing() for _ in range(4)))
    found = places(model, {Sharing: RECOMPUTE, nn.LayerNorm: SAVE}, every=2)
    assert found == {"0": "recompute", "0.norm": "save", "2": "recompute"}


def test_a_predicate_may_have_a_default() -> None:
    assert regions(GPT(), {lambda name, module=None: name == "layers.1": RECOMPUTE}) == ["layers.1"]
    assert regions(GPT(), {lambda module, kind=Block: isinstance(module, kind): RECOMPUTE}) == regions(GPT())


def test_a_list_with_a_forward_of_its_own_is_called() -> None:
    class Dense(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.values():
                x = torch.cat([x, part(x)], -1)
            return x

    model = nn.Sequential(Dense({"a": nn.Linear(2, 2), "b": nn.Linear(4, 2)}), nn.Linear(6, 1))
    assert regions(model, {Dense: RECOMPUTE}) == ["0"]
    model(torch.ones(1, 2)).sum().backward()


# What is refused.


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"layer.*": RECOMPUTE}, "pattern 'layer.*' matches no module of GPT; did you mean 'layers.*'"),
        ({"layers.9": RECOMPUTE}, "pattern 'layers.9' matches no module of GPT; did you mean 'layers.*'"),
        ({"**.attention": RECOMPUTE}, "did you mean 'layers.*.attn"),
        ({"layers[0]": RECOMPUTE}, "did you mean 'layers.*'"),
        ({"model.layers.*": RECOMPUTE}, "did you mean 'layers.*'"),
        ({"layers.*.attn.weight": RECOMPUTE}, "'layers.*.attn'"),
        ({r"re:layer\..": RECOMPUTE}, "did you mean 'layers.*'"),
        (
            {"check": "values"},
            "{'check': 'values'} holds options of a region and names no modules; give the options to modules",
        ),
        ({nn.Conv2d: RECOMPUTE}, "rule Conv2d matches no module of GPT; its classes are GPT, Embedding, Block"),
        ({lambda m: False: RECOMPUTE}, "matches no module of GPT; its classes are"),
        ({"layers": RECOMPUTE}, "rule 'layers' matches only 'layers' of GPT, but a ModuleList is never called itself"),
        ({}, "the rules are empty; leave them out to recompute the model's repeated blocks"),
        ({"layers.*": "fast"}, "rule 'layers.*': expected 'full' or 'selective', not 'fast'"),
        ({"layers.*": {"earlystop": 1}}, "rule 'layers.*': there is no option 'earlystop'; did you mean 'early_stop'?"),
        ({"layers.*": {"check": "x"}}, "rule 'layers.*': check='x': expected"),
        ({"re:(": RECOMPUTE}, "pattern 're:(' is not a valid regular expression"),
        ("layers.*", "'layers.*' is not one of the ready-made rules 'full', 'selective', 'every:N'"),
        ("every:0", "'every:0': expected a whole number of at least 1"),
        ("every:x", "'every:x': expected a whole number of at least 1"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rules: Any, text: str) -> None:
    model = GPT()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared)
        recollect.apply(model, rules)
    assert text in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({3: RECOMPUTE}, "rule 3: expected a pattern over module names, a subclass of torch.nn.Module"),
        ({int: RECOMPUTE}, "rule int: expected a pattern"),
        ({"layers.*": 3}, "rule 'layers.*': expected a policy"),
        (3, "rules: expected one of 'full'"),
        (["layers.*"], "or a mapping from name patterns, classes or predicates"),
    ],
)
def test_a_rule_of_no_kind_is_refused(rules: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        recollect.apply(GPT(), rules)
    assert text in str(caught.value)


@pytest.mark.parametrize("options", [{"every": 0}, {"first": 0}, {"every": 1.5}, {"first": True}, {"every": "2"}])
def test_a_count_must_be_one_or_more(options: Any) -> None:
    (option,) = options
    with pytest.raises(ValueError, match=f"{option}=.*: expected a whole number of at least 1"):
        recollect.apply(GPT(), **options)


def test_two_words_for_every_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="rules='every:2' and every=3 both choose how many blocks"):
        recollect.apply(GPT(), "every:2", every=3)


def test_a_model_without_blocks_says_what_it_has() -> None:
    model, _ = MODELS["tagger"]()
    with pytest.raises(
        ValueError, match=r"(?s)Tagger has no repeated blocks.*Its largest modules are 'lstm', 'cell', 'rnn'"
    ):
        recollect.apply(model)
    with pytest.raises(ValueError, match=r"It has no modules inside: use recollect.checkpoint\(model\)"):
        recollect.apply(nn.Linear(2, 2))


def test_the_first_argument_is_a_model() -> None:
    with pytest.raises(TypeError, match=r"recollect.apply expects a torch.nn.Module first, not dict"):
        recollect.apply({"layers.*": RECOMPUTE})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"recollect.remove expects a torch.nn.Module, not str"):
        recollect.remove("model")  # type: ignore[arg-type]


def test_a_module_is_applied_to_once() -> None:
    model = GPT()
    handle = recollect.apply(model, {"layers.0": RECOMPUTE})
    with pytest.raises(
        ValueError,
        match=r"module 'layers.0' \(Block\) cannot be made a region: it already is one, from an earlier",
    ):
        recollect.apply(model)
    assert [n for n, module in model.named_modules() if "forward" in vars(module)] == ["layers.0"]
    recollect.apply(model, {"layers.1": RECOMPUTE})
    handle.remove()
    recollect.apply(model, {"layers.0": RECOMPUTE})


def test_what_an_earlier_region_does_not_know_of_is_refused() -> None:
    model = GPT()
    recollect.apply(model, {"layers.*": RECOMPUTE})
    with pytest.raises(ValueError, match=r"module 'attn' of 'layers.0' cannot be kept: an earlier recollect.apply"):
        recollect.apply(model, {"layers.*.attn": SAVE})
    recollect.apply(model, {"layers.*.attn": RECOMPUTE})


def test_a_forward_that_is_a_property_is_refused() -> None:
    class Odd(nn.Module):
        @property
        def forward(self) -> Any:  # type: ignore[override]
            return torch.sin

    with pytest.raises(ValueError, match="its class defines forward as a property"):
        recollect.apply(nn.Sequential(Odd()), {"0": RECOMPUTE})


def test_what_is_wrapped_already_is_refused() -> None:
    model: Any = Looped()
    model.block = compat.checkpoint_wrapper(model.block)
    with pytest.raises(ValueError, match=r"module 'block' .* it is already wrapped in a CheckpointWrapper"):
        recollect.apply(model, {"block": RECOMPUTE})


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="it is compiled by TorchScript and has no Python code"):
        recollect.apply(model, {"0": RECOMPUTE})
