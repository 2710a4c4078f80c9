"""The largest batch or length that fits: how it is searched, and what it is for each way to run a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies
from torch import nn

import recollect
from recollect._core.profiles import Profile
from recollect._fit.largest import FULL, PLAIN, PLANNED, Sizes, search_largest

pytest.importorskip("scipy")


@given(
    slope=strategies.integers(1, 10**6),
    bend=strategies.sampled_from([0, 0, 1, 1000]),
    limit=strategies.integers(0, 10**12),
    start=strategies.integers(1, 10**4),
)
def test_the_largest_that_fits_is_found_in_few_tries(slope: int, bend: int, limit: int, start: int) -> None:
    asked: list[int] = []

    def excess(number: int) -> int:
        asked.append(number)
        return slope * number + bend * number * number - limit

    found = search_largest(excess, start=start)
    assert found == 0 or excess(found) <= 0
    if found < 2**25:
        assert excess(found + max(1, found // 200)) > 0
    assert len(set(asked)) < (16 if bend == 0 else 40)


def test_what_is_known_is_not_asked_again() -> None:
    asked: list[int] = []
    known = {number: 3 * number - 1000 for number in (300, 400)}
    assert search_largest(lambda number: asked.append(number) or 3 * number - 1000, known=known) == 333  # type: ignore[func-returns-value]
    assert asked == [333, 334]


def profile_at(batch: int) -> Profile:
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        model, x = nn.Sequential(*blocks), torch.randn(batch, 64)
    return recollect.profile(model, x, dry=True, device="H100")


def test_a_plan_lets_a_step_be_larger_than_a_plain_one() -> None:
    sizes = Sizes(profile_at, 80 * 2**20)
    plain, full, planned = (sizes.find_largest(way, start=256, multiple_of=32) for way in (PLAIN, FULL, PLANNED))
    assert 0 < plain.value < full.value <= planned.value
    assert planned.value % 32 == 0
    for one in (plain, full, planned):
        assert one.peak_bytes <= 80 * 2**20
        assert one.step_s > 0
    assert recollect.plan(sizes.profile(planned.value), budget=80 * 2**20).peak_bytes == planned.peak_bytes


def test_nothing_fits_where_the_parameters_do_not() -> None:
    found = Sizes(profile_at, 2**20).find_largest(PLANNED, start=8)
    assert found.value == 0
