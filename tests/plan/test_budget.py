"""Budgets are read as people write them, and refused in words where they cannot be."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from recollect._plan.budget import parse_budget

GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "count"),
    [(5, 5), ("5", None), ("40GiB", 40 * GIB), (" 1.5 gib ", GIB * 3 // 2), ("2GB", 2 * 10**9), ("75%", 60 * GIB)],
)
def test_a_budget_is_bytes_text_with_a_unit_or_a_share_of_the_device(budget: int | str, count: int | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match="budget '5': expected bytes as a whole number, text like '40GiB'"):
            parse_budget(budget, device_bytes=80 * GIB)
    else:
        assert parse_budget(budget, device_bytes=80 * GIB).bytes == count


@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_a_whole_number_of_numpy_is_bytes(kind: type[np.integer[Any]]) -> None:
    count = parse_budget(kind(3_000_000)).bytes  # type: ignore[arg-type]
    assert count == 3_000_000
    assert type(count) is int


@pytest.mark.parametrize("word", ["min", "fastest", " Min "])
def test_goals_have_no_bytes(word: str) -> None:
    assert parse_budget(word).bytes is None


def test_a_share_of_an_unknown_device_is_refused_with_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"a share needs to know how much memory the device has, .* Give bytes"):
        parse_budget("80%")


def test_more_than_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 100% of the device's memory"):
        parse_budget("120%", device_bytes=1)
    with pytest.raises(ValueError, match="expected at most 100% of the device's memory"):
        parse_budget("120%")


@pytest.mark.parametrize(
    ("budget", "hint"),
    [
        ("40", "to say GiB, write '40GiB'"),
        ("0", "write 'min' for the smallest possible peak"),
        ("-1", "it cannot be negative"),
        ("-5%", "it cannot be negative"),
        (-1, "it cannot be negative"),
        (0.9, "for a share, write '90%'"),
        (40e9, "write 40000000000"),
        (Fraction(40_000_000_000), "write 40000000000"),
        (Decimal("0.5"), "for a share, write '50%'"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_with_what_to_write(budget: object, hint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"'min' or 'fastest'; {hint}"):
        parse_budget(budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [None, 1.5, True])
def test_other_kinds_are_refused(budget: object) -> None:
    with pytest.raises(TypeError, match="expected bytes as a whole number"):
        parse_budget(budget)  # type: ignore[arg-type]
