"""Variants tried in one test fail it, each by name, and none hides another."""

import pytest

from tests.trying import try_all


def test_each_variant_that_fails_is_named_and_all_are_tried() -> None:
    tried = []

    def check(number: int) -> None:
        tried.append(number)
        assert number % 2

    with pytest.RaisesGroup(AssertionError, AssertionError, match="2 of 4 variants failed") as caught:
        try_all(check, range(4))
    assert tried == [0, 1, 2, 3]
    notes = [error.__notes__[-1] for error in caught.value.exceptions]
    assert notes == ["this was variant 0", "this was variant 2"]


def test_nothing_to_try_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="no variants"):
        try_all(print, [])
