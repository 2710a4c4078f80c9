"""Comparisons of a site's numbers are values: they print as they are written, compare, and join."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from recollect._core.decisions import Decision, Site
from recollect._policy.predicates import Predicate, as_predicate
from recollect.policies import flops, flops_per_byte, nbytes
from tests.policy.sites import MM, SIN


def is_product(site: Site) -> bool:
    return site.op == "aten.mm.default"


@pytest.mark.parametrize(
    ("predicate", "text", "answers"),
    [
        (flops_per_byte > 8, "flops_per_byte > 8", (False, False)),
        (flops_per_byte >= 8, "flops_per_byte >= 8", (True, False)),
        (flops < 4096, "flops < 4096", (False, True)),
        (nbytes <= 512, "nbytes <= 512", (True, True)),
        (0.5 < flops_per_byte, "flops_per_byte > 0.5", (True, False)),  # noqa: SIM300 (its reflection is tested)
        ((flops > 1e3) & (nbytes > 1), "(flops > 1000.0) & (nbytes > 1)", (True, False)),
        ((flops > 1000) | (nbytes > 1), "(flops > 1000) | (nbytes > 1)", (True, True)),
        ((flops > 1) & as_predicate(is_product), "(flops > 1) & (is_product)", (True, False)),
    ],
)
def test_a_comparison_prints_as_it_is_written(predicate: Predicate, text: str, answers: tuple[bool, bool]) -> None:
    assert repr(predicate) == text
    assert (predicate(MM), predicate(SIN)) == answers


def test_equal_comparisons_are_equal() -> None:
    one, other = (flops > 3) & (nbytes > 1), (flops > 3) & (nbytes > 1)
    assert one == other
    assert hash(one) == hash(other)
    assert (flops > 3) != (flops >= 3)
    assert as_predicate(is_product) == as_predicate(is_product)
    assert hash(as_predicate(is_product)) == hash(as_predicate(is_product))


@pytest.mark.parametrize(
    "written",
    [
        lambda: 1 < flops < 3,
        lambda: flops > 1 and nbytes > 2,
        lambda: flops > 1 or nbytes > 2,
        lambda: not flops > 1,
    ],
)
def test_what_would_drop_a_side_is_refused(written: Callable[[], Any]) -> None:
    with pytest.raises(TypeError) as caught:
        written()
    assert str(caught.value) == (
        "'flops > 1' is a condition on sites, neither true nor false by itself.\n"
        "Join two with & or |, each in parentheses: (flops > 1e6) & (nbytes < 1024); for anything else write a "
        "function of a site."
    )


@pytest.mark.parametrize("bound", ["1MiB", None, True])
def test_a_bound_is_a_number(bound: Any) -> None:
    with pytest.raises(TypeError, match=f"^flops > {bound!r}: expected a number, as in nbytes > "):
        flops > bound  # noqa: B015 (raises)


def test_only_predicates_are_joined() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        (flops > 1) & is_product  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        (flops > 1) | 3  # type: ignore[operator]


def test_a_function_must_say_yes_or_no() -> None:
    def mistaken(_: Site) -> Any:
        return Decision.RECOMPUTE

    with pytest.raises(TypeError) as caught:
        as_predicate(mistaken)(MM)
    assert str(caught.value) == (
        "predicate mistaken answered <Decision.RECOMPUTE: 'recompute'> for aten.mm.default in region 'block', which is "
        "neither True nor False.\n"
        "A function that returns a recollect.Decision is a policy by itself and needs no save_if."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (flops, "save_if(flops): a measure is not a condition; compare it with a bound: flops > 100"),
        (
            True,
            (
                "save_if expects a comparison such as flops_per_byte > 100, or a function from a recollect.Site "
                "to True or False; not bool True"
            ),
        ),
    ],
)
def test_what_is_no_question_is_refused(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        as_predicate(value)
