"""Names and modules are kept whole, without a look at operators; what matches no module is refused."""

from typing import Any

import pytest
from torch import nn

from recollect import policies
from recollect._core.decisions import Decision
from recollect._policy.base import Verdict
from tests.policy.sites import site


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(2, 2))
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2, 2)


MODULES: dict[str, Any] = {path: module for path, module in Model().named_modules() if path}


def test_save_names_keeps_names() -> None:
    policy = policies.save_names("attn", "expert_*")
    text = "save_names('attn', 'expert_*')"
    assert repr(policy) == text
    assert policy.labels == (text,)
    assert [policy.keeps_name(name) for name in ("attn", "expert_1", "attention", "q")] == [text, text, None, None]
    assert policy == policies.save_names("attn", "expert_*", "attn")
    assert not policy.answers_all


def test_save_names_matches_sites_inside_a_named_block() -> None:
    policy = policies.save_names("attn")
    assert policy.judge(site(scopes=("block", "attn", "q"))) == Verdict(Decision.SAVE, by="save_names('attn')")
    assert policy.judge(site(scopes=("block",))) is None
    assert policy.judge(site(module="attn")) is None


def test_save_modules_keeps_modules_by_path_and_class() -> None:
    policy = policies.save_modules("layers.*.attn", r"re:he.d", nn.LayerNorm)
    text = "save_modules('layers.*.attn', 're:he.d', LayerNorm)"
    assert repr(policy) == text
    assert policy.labels == (text,)
    assert [path for path, module in MODULES.items() if policy.keeps_module(path, module)] == [
        "layers.0.attn",
        "layers.0.norm",
        "layers.1.attn",
        "layers.1.norm",
        "head",
    ]
    assert policy.keeps_module("head", MODULES["head"]) == text
    policy.check_modules(MODULES)


def test_subclasses_are_of_the_class() -> None:
    assert policies.save_modules(nn.Module).keeps_module("head", nn.Linear(1, 1))


def test_save_modules_matches_sites_in_and_inside_a_module() -> None:
    policy = policies.save_modules("layers.*", nn.LayerNorm)
    saved = ["layers.0", "layers.0.attn", "layers.0.attn.0"]
    left = ["", "layers", "layersx.0", "head"]
    assert [path for path in [*saved, *left] if policy.judge(site(module=path))] == saved
    assert policies.save_modules("re:.*").judge(site(module="")) is not None


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (
            "layer.*",
            ("pattern 'layer.*' matches no module of the region; did you mean 'layers.0', 'layers.1' or 'layers'?"),
        ),
        (
            "blocks.*.zzz",
            (
                "pattern 'blocks.*.zzz' matches no module of the region; did you mean 'layers.0.attn', "
                "'layers.0.norm', 'layers.1.attn' or 'layers.1.norm'?"
            ),
        ),
        (
            nn.Conv2d,
            (
                "class Conv2d matches no module of the region; its classes are Block, LayerNorm, Linear, ModuleList, "
                "Sequential"
            ),
        ),
    ],
)
def test_what_matches_no_module_is_refused_with_what_is_near(pattern: str | type[nn.Module], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared whole)
        policies.save_modules("head", pattern).check_modules(MODULES)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("head", "pattern 'head' matches no module of the region, which has no modules inside"),
        (nn.Linear, "class Linear matches no module of the region, which has none"),
    ],
)
def test_a_region_without_modules_is_said_to_have_none(pattern: str | type[nn.Module], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared whole)
        policies.save_modules(pattern).check_modules({})
    assert str(caught.value) == text


EXPECTED = "save_modules expects patterns over module paths, or subclasses of torch.nn.Module; not "


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ((int,), f"{EXPECTED}the class int"),
        ((nn.ReLU(),), f"{EXPECTED}<module ReLU>: pass its path, or its class ReLU"),
        (("head", 3), f"{EXPECTED}int 3"),
    ],
)
def test_a_module_is_named_by_path_or_class(patterns: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        policies.save_modules(*patterns)
    assert str(caught.value) == text


def test_something_must_be_named() -> None:
    with pytest.raises(ValueError, match=r"^save_names\(\) needs a name; to save nothing, use save_nothing$"):
        policies.save_names()
    with pytest.raises(ValueError, match=r"^save_modules\(\) needs a pattern; to save nothing, use save_nothing$"):
        policies.save_modules()


def test_bad_patterns_are_refused_when_the_policy_is_made() -> None:
    with pytest.raises(ValueError, match=r"pattern 're:\(' is not a valid regular expression"):
        policies.save_names("re:(")
    with pytest.raises(ValueError, match=r"pattern 're:\(' is not a valid regular expression"):
        policies.save_modules("re:(")
    with pytest.raises(TypeError, match="expected a pattern as a string, not int 3"):
        policies.save_names(3)  # type: ignore[arg-type]
