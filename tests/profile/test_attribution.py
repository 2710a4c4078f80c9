"""What calls cost in the step as it runs without us."""

import pytest

from recollect._profile.attribution import Cost, Plain, attribute, choose_seconds


def cost(device_us: float, host_us: float | None = None, *, is_optimizer: bool = False) -> Cost:
    host_s = None if host_us is None else host_us * 1e-6
    return Cost(device_s=device_us * 1e-6, host_s=host_s, is_optimizer=is_optimizer)


def plain(wall_us: float, host_us: float) -> Plain:
    return Plain(wall_s=wall_us * 1e-6, host_s=host_us * 1e-6)


def test_a_launch_bound_step_costs_its_launches() -> None:
    found = attribute([cost(2, 5), cost(6, 15)], plain(100, 100), None, is_apart=False)
    assert [one.device_s for one in found] == pytest.approx([2e-6, 6e-6])
    assert [one.host_s for one in found] == pytest.approx([45e-6, 55e-6])  # 80 us between the calls, shared out
    assert choose_seconds(found) == pytest.approx([45e-6, 55e-6])


def test_a_device_bound_step_costs_what_the_device_takes() -> None:
    found = attribute([cost(200, 5), cost(600, 15)], plain(1000, 100), None, is_apart=False)
    assert choose_seconds(found) == pytest.approx([250e-6, 750e-6])
    assert sum(one.host_s or 0 for one in found) == pytest.approx(100e-6)


def test_a_host_that_was_slower_while_it_was_watched_is_scaled_down() -> None:
    found = attribute([cost(1, 30), cost(1, 90)], plain(60, 60), None, is_apart=False)
    assert [one.host_s for one in found] == pytest.approx([15e-6, 45e-6])


def test_on_the_host_calls_share_the_time_of_the_step() -> None:
    found = attribute([cost(10), cost(30)], plain(60, 60), None, is_apart=False)
    assert choose_seconds(found) == pytest.approx([15e-6, 45e-6])
    assert [one.host_s for one in found] == [None, None]


def test_an_optimizer_that_was_timed_apart_is_scaled_apart() -> None:
    calls = [cost(100, 10), cost(10, 5, is_optimizer=True)]
    found = attribute(calls, plain(200, 20), plain(40, 8), is_apart=True)
    assert choose_seconds(found) == pytest.approx([200e-6, 40e-6])


def test_an_optimizer_that_was_not_timed_stays_as_estimated() -> None:
    calls = [cost(100, 10), cost(10, 5, is_optimizer=True)]
    found = attribute(calls, plain(200, 20), None, is_apart=True)
    assert choose_seconds(found) == pytest.approx([200e-6, 10e-6])


def test_the_whole_of_a_launch_bound_body_and_a_device_bound_optimizer_is_judged_together() -> None:
    calls = [cost(20, 10), cost(10, 5, is_optimizer=True)]
    found = attribute(calls, plain(100, 100), plain(90, 10), is_apart=True)
    assert sum(choose_seconds(found)) == pytest.approx(110e-6)  # 100 + 10 of the host; 20 + 90 of the device


def test_calls_that_take_no_time_share_what_there_is() -> None:
    assert choose_seconds(attribute([cost(0), cost(0)], plain(10, 10), None, is_apart=False)) == pytest.approx(
        [5e-6, 5e-6]
    )


def test_no_calls_cost_nothing() -> None:
    assert attribute([], plain(10, 10), None, is_apart=False) == []
