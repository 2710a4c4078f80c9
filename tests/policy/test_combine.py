"""Combinations ask their parts in order, tell the engine what these tell, and name the part that decided."""

from typing import Any

import pytest
import torch
from torch import nn

from recollect import policies
from recollect._core.decisions import Decision, Site
from recollect._policy.base import Policy, Verdict
from tests.policy.sites import MM, SIN, site


class Twice(torch.autograd.Function):
    pass


class Thrice(torch.autograd.Function):
    pass


def keep_sines(site: Site) -> Decision:
    return Decision.SAVE if site.op == "aten.sin.default" else Decision.RECOMPUTE


NAMES = {
    **{name: getattr(policies, name) for name in policies.__all__},
    "Decision": Decision,
    "keep_sines": keep_sines,
    "Linear": nn.Linear,
}

TEXTS = [
    "first_match(save_matmuls, save_names('q'), otherwise(Decision.RECOMPUTE))",
    "first_match(save_matmuls, keep_sines)",
    "otherwise(save_matmuls)",
    "per_region({'layers.*': save_all, '**': Decision.RECOMPUTE})",
    "strictly(first_match(save_ops('aten.mm.default'), save_modules('attn', Linear)))",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_combination_prints_as_the_call_that_makes_it(text: str) -> None:
    made, again = eval(text, dict(NAMES)), eval(text, dict(NAMES))
    assert repr(made) == text
    assert made == again
    assert hash(made) == hash(again)


def test_the_first_to_say_something_decides_and_is_named() -> None:
    policy = policies.first_match(policies.save_random, policies.first_match(policies.save_matmuls), keep_sines)
    assert policy.judge(MM) == Verdict(Decision.SAVE, by="save_matmuls")
    assert policy.judge(SIN) == Verdict(Decision.SAVE, by="keep_sines")
    assert policy.judge(site("aten.cos.default")) == Verdict(Decision.RECOMPUTE, by="keep_sines")
    assert policies.first_match(policies.save_random, policies.save_matmuls).judge(SIN) is None


def test_a_part_may_decide_against_saving() -> None:
    policy = policies.first_match(policies.per_region({"head": Decision.RECOMPUTE}), policies.save_matmuls)
    assert policy(MM) is Decision.SAVE
    assert policy.judge(site("aten.mm.default", region="head")) == Verdict(Decision.RECOMPUTE, by="Decision.RECOMPUTE")


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (policies.save_all, "save_all"),
        (policies.otherwise(Decision.RECOMPUTE), "otherwise(Decision.RECOMPUTE)"),
        (policies.otherwise(policies.save_random), "otherwise(save_random)"),
        (Decision.SAVE, "Decision.SAVE"),
        (keep_sines, "keep_sines"),
        (policies.strictly(keep_sines), "strictly(keep_sines)"),
        (policies.first_match(policies.save_random, keep_sines), "first_match(save_random, keep_sines)"),
    ],
)
def test_what_is_never_reached_is_refused(first: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared whole)
        policies.first_match(policies.save_attention, first, policies.save_matmuls)
    assert str(caught.value) == f"first_match never reaches save_matmuls: {text} before it decides for every site"


def test_otherwise_answers_for_everything() -> None:
    by_decision, by_policy = policies.otherwise(Decision.SAVE), policies.otherwise(policies.save_matmuls)
    assert by_decision.judge(SIN) == Verdict(Decision.SAVE, by="otherwise(Decision.SAVE)")
    assert by_policy.judge(MM) == Verdict(Decision.SAVE, by="save_matmuls")
    assert by_policy.judge(SIN) == Verdict(Decision.RECOMPUTE, by="otherwise(save_matmuls)")
    assert policies.otherwise(keep_sines).judge(SIN) == Verdict(Decision.SAVE, by="keep_sines")
    assert by_decision.labels == ()
    assert by_policy.labels == ("save_matmuls",)


def test_the_region_picks_the_policy() -> None:
    policy = policies.per_region({"layers.0": policies.save_all, "layers.*": policies.save_matmuls, "head": keep_sines})
    assert policy.within("layers.0") == policies.save_all
    assert policy.within("layers.1") == policies.save_matmuls
    assert policy.within("embed") == policies.save_nothing
    assert policy.judge(site("aten.mm.default", region="layers.1")) == Verdict(Decision.SAVE, by="save_matmuls")
    assert policy.judge(site("aten.mm.default", region="embed")) is None
    assert policy.judge(site(region="head")) == Verdict(Decision.SAVE, by="keep_sines")
    assert not policies.per_region({"**": Decision.SAVE}).answers_all


def test_modules_and_names_wait_for_the_region() -> None:
    policy = policies.per_region(
        {"a": policies.first_match(policies.save_modules("x"), policies.save_names("q")), "b": policies.save_all}
    )
    assert policy.keeps_module("x", None) is None
    assert policy.keeps_name("q") is None
    policy.check_modules({})
    within = policy.within("a")
    assert within.keeps_module("x", None) == "save_modules('x')"
    assert within.keeps_name("q") == "save_names('q')"
    with pytest.raises(ValueError, match="matches no module"):
        within.check_modules({})


@pytest.mark.parametrize("wrap", [policies.otherwise, policies.strictly, policies.first_match])
def test_every_combination_resolves_the_regions_inside_it(wrap: Any) -> None:
    policy = wrap(policies.per_region({"a": policies.per_region({"*": policies.save_matmuls})}))
    assert policy.within("a") == wrap(policies.save_matmuls)


def test_what_a_region_never_reaches_is_not_asked_there() -> None:
    policy = policies.first_match(policies.per_region({"head": Decision.RECOMPUTE}), policies.save_modules("x"))
    assert policy.within("head").keeps_module("x", None) is None
    assert policy.within("head").labels == ()
    assert policy.within("body").keeps_module("x", None) == "save_modules('x')"


PLACES: Policy = policies.first_match(policies.save_modules("x"), policies.save_names("q"))


@pytest.mark.parametrize("policy", [PLACES, policies.strictly(PLACES), policies.otherwise(PLACES)], ids=repr)
def test_a_combination_tells_what_its_parts_tell(policy: Policy) -> None:
    assert policy.labels == ("save_modules('x')", "save_names('q')")
    assert policy.keeps_module("x", None) == "save_modules('x')"
    assert policy.keeps_module("y", None) is None
    assert policy.keeps_name("q") == "save_names('q')"
    assert policy.keeps_name("k") is None
    policy.check_modules({"x": None})
    with pytest.raises(ValueError, match="pattern 'x' matches no module"):
        policy.check_modules({"y": None})


def test_labels_and_functions_of_all_parts_are_joined_once() -> None:
    policy = policies.first_match(
        policies.save_ops(Twice),
        policies.per_region({"a": policies.save_ops(Twice), "b": policies.save_every([Thrice, Twice], 2)}),
    )
    assert policy.labels == ("save_ops(Twice)", "save_every((Thrice, Twice), 2)")
    assert policy.functions == (Twice, Thrice)


def test_strictness_switches_the_defaults_off_wherever_it_stands() -> None:
    strict = policies.strictly(policies.save_matmuls)
    assert policies.first_match(policies.save_matmuls).keeps_defaults
    assert not strict.keeps_defaults
    assert not policies.first_match(policies.save_random, strict).keeps_defaults
    assert not policies.otherwise(strict).keeps_defaults
    assert policies.per_region({"a": strict}).within("b").keeps_defaults
    assert not policies.per_region({"a": strict}).within("a").keeps_defaults
    assert strict.judge(MM) == Verdict(Decision.SAVE, by="save_matmuls")
    assert strict.judge(SIN) is None


def test_something_must_be_combined() -> None:
    with pytest.raises(ValueError, match=r"^first_match\(\) needs a policy; to save nothing, use save_nothing$"):
        policies.first_match()
    with pytest.raises(ValueError, match=r"^per_region\(\{\}\) names no region; to save nothing, use save_nothing$"):
        policies.per_region({})


@pytest.mark.parametrize("wrap", [policies.first_match, policies.otherwise, policies.strictly])
def test_only_policies_are_combined(wrap: Any) -> None:
    with pytest.raises(TypeError, match=r"^expected a policy: .*; not int 3$"):
        wrap(3)


def test_policies_are_not_combined_as_a_list() -> None:
    with pytest.raises(
        TypeError, match=r"^first_match takes policies one by one, not as a list: write first_match\(\*policies\)$"
    ):
        policies.first_match([policies.save_all])  # type: ignore[arg-type]


def test_regions_are_given_by_pattern() -> None:
    with pytest.raises(TypeError, match=r"^expected a policy: .*; not int 3$"):
        policies.per_region({"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is not a valid regular expression"):
        policies.per_region({"re:(": policies.save_all})
    with pytest.raises(TypeError) as caught:
        policies.per_region([policies.save_all])  # type: ignore[arg-type]
    assert str(caught.value) == (
        "per_region expects a mapping from patterns over region names to policies, not list [save_all]"
    )


def test_a_combination_goes_by_names_if_one_of_its_parts_does() -> None:
    assert policies.first_match(policies.save_matmuls, policies.save_names("q")).sees_names
    assert not policies.first_match(policies.save_matmuls, policies.save_modules("q")).sees_names
