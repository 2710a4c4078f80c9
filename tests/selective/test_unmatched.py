"""Rules that match nothing are warned about once, with what they could have matched."""

import gc
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, policies
from recollect._policy.base import Policy, as_policy
from recollect._selective import knowledge as knowledge_module
from recollect._selective import unmatched
from recollect._selective.unmatched import count_matches, warn_unmatched


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have used equal policies."""
    monkeypatch.setattr(knowledge_module, "_known", WeakKeyDictionary())
    monkeypatch.setattr(unmatched, "_decided", {})


def square() -> Tensor:
    return torch.ones(4, 4, requires_grad=True)


def wave(x: Tensor) -> Tensor:
    return (x @ x.t()).sin().cos().sin()


def run(policy: Policy, fn: Callable[..., Any] = wave, *args: Any, name: str | None = None) -> None:
    recollect.checkpoint(fn, policy=policy, name=name)(*(args or (square(),)))


def warned(policy: Policy) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_unmatched(policy)
    assert all(warning.category is UserWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_an_operator_that_did_not_run_is_warned_about_with_those_that_did() -> None:
    policy = policies.save_ops("aten.bmm.default")
    run(policy)
    (text,) = warned(policy)
    assert text == (
        "policy save_ops('aten.bmm.default') matched nothing in this step. Operators that ran there: "
        "aten.sin.default (2 times), aten.mm.default (1 time), aten.cos.default (1 time)"
    )


def test_a_policy_is_warned_about_once() -> None:
    policy = policies.save_ops("aten.bmm.default")
    run(policy)
    assert len(warned(policy)) == 1
    assert warned(policy) == []
    assert warned(policies.save_ops("aten.bmm.default")) == []


def test_what_was_decided_is_forgotten_with_the_policy() -> None:
    policy = policies.save_ops("aten.bmm.default")
    warned(policy)
    assert unmatched._decided
    del policy
    gc.collect()
    assert not unmatched._decided


def test_a_policy_whose_rules_all_match_is_silent() -> None:
    policy = policies.first_match(policies.save_matmuls, policies.save_ops("aten.cos.default"))
    run(policy)
    assert warned(policy) == []


def test_each_rule_is_looked_at() -> None:
    policy = policies.first_match(policies.save_matmuls, policies.save_attention, policies.save_random)
    run(policy)
    assert [text.partition(" matched ")[0] for text in warned(policy)] == [
        "policy save_attention",
        "policy save_random",
    ]


def test_a_match_in_any_region_counts() -> None:
    policy = policies.save_ops("aten.exp.default")
    run(policy)
    run(policy, lambda x: x.exp().sin())
    assert warned(policy) == []


def test_a_rule_that_others_forestall_is_no_mistake() -> None:
    policy = policies.first_match(policies.save_matmuls, policies.save_ops("aten.mm.default"))
    run(policy)
    assert warned(policy) == []


@pytest.mark.parametrize(
    "policy",
    [policies.save_nothing, as_policy(Decision.RECOMPUTE), as_policy(lambda site: Decision.RECOMPUTE)],
    ids=["nothing", "decision", "function"],
)
def test_what_has_no_rules_is_silent(policy: Policy) -> None:
    run(policy)
    assert warned(policy) == []


def test_a_bound_that_nothing_reaches_is_held_against_the_largest_value() -> None:
    policy = policies.save_larger_than("1MiB")
    run(policy)
    (text,) = warned(policy)
    assert text == (
        "policy save_larger_than('1MiB') matched nothing in this step. The largest value there: 64 B, "
        "of aten.mm.default"
    )


def test_many_operators_are_not_all_listed() -> None:
    def many(x: Tensor) -> Tensor:
        for fn in (
            torch.sin,
            torch.cos,
            torch.exp,
            torch.tanh,
            torch.erf,
            torch.abs,
            torch.neg,
            torch.floor,
            torch.sgn,
        ):
            x = fn(x)
        return x

    policy = policies.save_matmuls
    run(policy, many)
    (text,) = warned(policy)
    assert text.endswith(", aten.floor.default (1 time) and 1 more")


def test_operators_inside_of_kept_blocks_are_said_not_to_be_asked_about() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    policy = policies.first_match(policies.save_modules("0"), policies.save_matmuls)
    run(policy, module)
    (text,) = warned(policy)
    assert text == (
        "policy save_matmuls matched nothing in this step. Operators that ran there: aten.tanh.default (1 "
        "time); those inside module '0', kept whole, were not considered"
    )


# Names


def named(x: Tensor) -> Tensor:
    k = recollect.name(x.sin(), "k")
    attend: Callable[[Tensor], Tensor] = recollect.region("attn")(lambda k: k.cos().exp())
    return attend(k)


def test_a_name_that_was_not_given_is_warned_about_with_those_that_were() -> None:
    policy = policies.save_names("q", "v")
    run(policy, named)
    assert warned(policy) == [
        "policy save_names('q', 'v') matched nothing in this step. Names given there: 'k', 'attn'"
    ]


def test_where_no_name_was_given_it_says_how_they_are() -> None:
    policy = policies.save_names("q")
    run(policy)
    (text,) = warned(policy)
    assert text == (
        "policy save_names('q') matched nothing in this step. Nothing there has a name; give names with "
        "recollect.region and recollect.name"
    )


@pytest.mark.parametrize("name", ["k", "attn", "a*"])
def test_a_name_that_was_given_is_silent(name: str) -> None:
    policy = policies.save_names(name)
    run(policy, named)
    assert warned(policy) == []


def test_a_named_value_that_another_rule_keeps_is_silent() -> None:
    policy = policies.first_match(policies.save_ops("aten.sin.default"), policies.save_names("k"))
    run(policy, named)
    assert warned(policy) == []


# Regions


def test_rules_for_other_regions_are_told_which_ran() -> None:
    policy = policies.per_region({"block": policies.save_matmuls, "haed": policies.save_ops("aten.cos.default")})
    run(policy, name="block")
    run(policy, name="head")
    assert warned(policy) == [
        "policy save_ops('aten.cos.default') matched no region in this step. Regions that ran: 'block', 'head'"
    ]


# Counting


def test_each_call_is_counted_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    checkpointed = recollect.checkpoint(module, policy=policies.save_matmuls)
    for _ in range(5):
        checkpointed(square()).sum().backward()
    (knowledge,) = knowledge_module.knowledge_of(module)
    (decisions,) = knowledge.by_kind.values()
    assert decisions.program is not None
    assert {count_matches(decisions, line) for line in decisions.lines} == {5}


def test_each_call_is_counted_once_after_a_plan_was_broken() -> None:
    sines = [True]

    class Fickle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x @ x
            return x.sin() if sines[0] else x.cos()

    checkpointed = recollect.checkpoint(module := Fickle(), policy=policies.save_matmuls)
    for sine in (True, True, False, True, True):
        sines[0] = sine
        checkpointed(square())
    (knowledge,) = knowledge_module.knowledge_of(module)
    (decisions,) = knowledge.by_kind.values()
    assert decisions.breaks == 1
    assert count_matches(decisions, decisions.lines[0]) == 4  # the one that left the plan kept nothing
