"""Real models train under every rule as they train plain, and with no more memory and work than torch's own switch."""

import pytest
import torch

import recollect
from tests.zoo.catalogue import ZOO
from tests.zoo.known import each
from tests.zoo.stepping import (
    RULES,
    build,
    differing,
    first_step,
    flops_of,
    look_after_a_step,
    look_of,
    peak_of,
    peak_under,
    plain_steps,
    switch_torchs_on,
    take_step,
    trained_plainly,
    trained_under,
)

pytest.importorskip("transformers")


@each("blocks")
def test_the_blocks_that_people_would_pick_become_regions(name: str) -> None:
    with recollect.apply(build(ZOO[name])) as handle:
        assert sum(place.is_region for place in handle.places) == ZOO[name].regions


@each("training", rules=RULES)
def test_steps_are_bitwise_the_plain_ones(name: str, rule: str) -> None:
    _, steps = trained_under(name, rule)
    for found, expected in zip(steps, plain_steps(name), strict=True):
        assert differing(found, expected) == []


@each("removal", rules=RULES)
def test_after_remove_a_model_is_what_plain_steps_would_have_made_of_it(name: str, rule: str) -> None:
    model, _ = trained_under(name, rule)
    look, step = trained_plainly(name)
    assert look_of(model) == look
    assert differing(take_step(ZOO[name], model), step) == []


@each("peak")
def test_the_peak_is_not_above_that_of_torchs_switch(name: str) -> None:
    other = build(ZOO[name])
    switch_torchs_on(ZOO[name], other)
    assert peak_under(name, "full") <= peak_of(ZOO[name], other)


@each("peaks")
def test_every_rule_lowers_the_peak(name: str) -> None:
    assert all(peak_under(name, rule) < peak_under(name) for rule in RULES)


@each("flops")
def test_no_more_is_run_again_than_with_torchs_switch(name: str) -> None:
    kind = ZOO[name]
    model, other = build(kind), build(kind)
    plain = flops_of(kind, model)
    again = {}
    for rule, options in RULES.items():
        with recollect.apply(model, **options):
            again[rule] = flops_of(kind, model, learns=rule == "selective") - plain
    switch_torchs_on(kind, other)
    assert 0 < again["full"] <= flops_of(kind, other) - plain
    assert 0 <= again["selective"] < again["full"]
    assert 0 < again["every 2nd"] < again["full"]


@each("profile", rules=RULES, in_turn=True)
def test_a_profile_is_of_the_steps_that_follow_and_leaves_the_model_as_one_would(name: str, rule: str) -> None:
    kind = ZOO[name]
    model = build(kind)
    with recollect.apply(model, **RULES[rule]):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        found = recollect.profile(model, kwargs=kind.inputs(), loss=kind.loss)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert differing(take_step(kind, model), first_step(name)) == []
    assert found.peak_bytes == pytest.approx(peak_under(name, rule), rel=0.01)
    assert look_of(model) == look_after_a_step(name)


@each("dry", rules=RULES, in_turn=True, begin=1)  # so that the largest do not learn, which takes four steps
def test_a_dry_profile_has_the_bytes_of_a_real_one_and_changes_nothing(name: str, rule: str) -> None:
    kind = ZOO[name]
    model = build(kind)
    with recollect.apply(model, **RULES[rule]):
        found = recollect.profile(model, kwargs=kind.inputs(), loss=kind.loss, dry=True, device="cpu")
        assert all(p.grad is None for p in model.parameters())
        assert differing(take_step(kind, model), first_step(name)) == []
    assert found.peak_bytes == pytest.approx(peak_under(name, rule), rel=0.02)
    assert look_of(model) == look_after_a_step(name)
