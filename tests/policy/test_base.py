"""A policy may be one of the catalogue, a function or a decision; what it answers is checked where it is asked."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from recollect import policies
from recollect._core.decisions import Decision, Site
from recollect._policy.base import Policy, Verdict, as_policy
from tests.policy.sites import MM, SIN


def keep_products(site: Site) -> Decision:
    return Decision.SAVE if site.op == "aten.mm.default" else Decision.RECOMPUTE


class Keeper:
    """Is equal to everything and has no hash, which must not matter."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, site: Site) -> Decision:
        return keep_products(site)

    def keep(self, site: Site) -> Decision:
        return keep_products(site)


def test_a_policy_of_the_catalogue_stays_what_it_is() -> None:
    assert as_policy(policies.save_matmuls) is policies.save_matmuls


def test_a_function_decides_and_is_named() -> None:
    policy = as_policy(keep_products)
    assert policy.judge(MM) == Verdict(Decision.SAVE, by="keep_products")
    assert policy.judge(SIN) == Verdict(Decision.RECOMPUTE, by="keep_products")
    assert policy(MM) is Decision.SAVE
    assert policy.labels == ()
    assert policy.answers_all
    assert policy.functions == ()


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (keep_products, "keep_products"),
        (functools.partial(keep_products), "keep_products"),
        (Keeper(), "Keeper"),
        (Keeper().keep, "keep"),
    ],
)
def test_whatever_can_be_called_has_a_name(fn: Callable[[Site], Decision], name: str) -> None:
    assert repr(as_policy(fn)) == name


def test_a_lambda_is_named_by_its_line() -> None:
    assert re.fullmatch(r"<lambda at test_base\.py:\d+>", repr(as_policy(lambda _: Decision.SAVE)))


def test_functions_are_compared_by_identity() -> None:
    one, other = Keeper(), Keeper()
    assert as_policy(one) == as_policy(one)
    assert as_policy(one) != as_policy(other)
    assert as_policy(one.keep) == as_policy(one.keep)
    assert hash(as_policy(one.keep)) == hash(as_policy(one.keep))
    assert as_policy(one.keep) != as_policy(other.keep)
    assert as_policy(keep_products) != policies.save_matmuls


@pytest.mark.parametrize("decision", Decision)
def test_a_decision_stands_for_every_site(decision: Decision) -> None:
    policy = as_policy(decision)
    assert policy.judge(SIN) == Verdict(decision, by=f"Decision.{decision.name}")
    assert policy == as_policy(decision)
    assert policy.answers_all


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (True, "True"),
        (None, "None"),
        ("save", "'save'"),
        (CheckpointPolicy.MUST_SAVE, repr(CheckpointPolicy.MUST_SAVE)),
    ],
)
def test_an_answer_that_is_no_decision_is_refused(answer: Any, shown: str) -> None:
    def mistaken(_: Site) -> Any:
        return answer

    with pytest.raises(TypeError) as caught:
        as_policy(mistaken)(MM)
    assert str(caught.value) == (
        f"policy mistaken answered {shown} for aten.mm.default in region 'block', which is not a decision.\n"
        "Return recollect.Decision.SAVE or recollect.Decision.RECOMPUTE, in every branch of the function."
    )


EXPECTED = (
    "expected a policy: one of recollect.policies, a function from a recollect.Site to a recollect.Decision, or a "
    "recollect.Decision; not "
)
BY_CLASS = "\nTo choose modules by class, write recollect.apply(model, {Linear: 'full'})"
JOIN = (
    ".\nCombine policies with policies.first_match(...), keep operators with policies.save_ops(...), "
    "tell regions apart with policies.per_region({...})."
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, f"{EXPECTED}None"),
        ("save_matmuls", f"{EXPECTED}str 'save_matmuls'"),
        ([policies.save_matmuls], f"{EXPECTED}list [save_matmuls]{JOIN}"),
        ({"layers.*": policies.save_all}, f"{EXPECTED}dict {{'layers.*': save_all}}{JOIN}"),
        (Decision, f"{EXPECTED}the class Decision"),
        (
            nn.Linear,
            f"{EXPECTED}the class Linear.{BY_CLASS}",
        ),
        (
            torch.ops.aten.mm.default,
            f"{EXPECTED}the operator aten.mm.default.\nTo keep its results, write policies.save_ops('aten.mm.default')",
        ),
        (policies.save_ops, "save_ops makes a policy but is not one itself: call it"),
    ],
)
def test_what_is_no_policy_is_refused(value: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        as_policy(value)
    assert str(caught.value) == text


def test_a_policy_that_is_called_like_a_function_says_that_it_is_one() -> None:
    with pytest.raises(TypeError, match=r"^save_attention is a policy as it is: write it without parentheses$"):
        policies.save_attention()


def test_a_policy_of_ones_own_needs_only_to_judge() -> None:
    class Silent(Policy):
        def judge(self, site: Site) -> None: ...

    policy = Silent()
    assert policy(MM) is Decision.RECOMPUTE
    assert policy.keeps_module("a", None) is None
    assert policy.keeps_name("a") is None
    assert policy.within("block") is policy
    assert (policy.sees_names, policy.keeps_defaults, policy.answers_all, policy.functions) == (False, True, False, ())
    policy.check_modules({})
