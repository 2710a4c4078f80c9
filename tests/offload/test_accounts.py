"""Accounts of one step: speeds of the link as large copies show them, and when offloading is not worth its waits."""

from typing import Any

import pytest

from recollect._offload.accounts import Accounts, OffloadReport

NO_CLOCK: Any = None  # only copies of the device are timed by a clock


def test_speeds_are_those_of_large_copies_and_the_time_is_that_of_all() -> None:
    accounts = Accounts(measures=False)
    accounts.note_written(1000, 1.0)
    accounts.note_written(500, 0.5)
    accounts.note_written(10, 2.0)  # tells of latency
    accounts.note_read(400, 2.0)
    assert accounts.speeds(NO_CLOCK) == (1000.0, 200.0, 3.5 + 2.0)


def test_the_slowest_part_of_the_way_counts() -> None:
    class Clock:
        def seconds(self, start: float, end: float) -> float:
            return end - start

        def is_past(self, mark: float) -> bool:
            return mark < 50

    accounts, clock = Accounts(measures=True), Clock()
    times: Any = accounts.out_times
    times += [(1000, 0.0, 0.5), (1000, 40.0, 60.0)]  # the second is still on its way
    accounts.note_written(1000, 2.0)
    out, back, copy_s = accounts.speeds(clock)  # type: ignore[arg-type]
    assert (out, back, copy_s) == (500.0, None, 2.0)


@pytest.mark.parametrize(
    ("stall_s", "forward_s", "is_slower"),
    [(0.3, 0.2, True), (0.2, 0.2, False), (0.9e-3, 0.1e-3, False), (None, 0.2, False), (0.3, None, False)],
)
def test_a_wait_is_compared_with_forward_unless_it_is_hardly_one(
    stall_s: float | None, forward_s: float | None, *, is_slower: bool
) -> None:
    report = OffloadReport(tier="host", stall_s=stall_s, forward_s=forward_s)
    assert report.is_slower_than_recomputing is is_slower
