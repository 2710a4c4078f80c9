"""What calls cost in the step as it runs without us."""

from dataclasses import replace

import pytest

from recollect._profile.attribution import Cost, Plain, attribute, choose_seconds


def cost(device_us: float, host_us: float | None = None, *, is_optimizer: bool = False) -> Cost:
    host_s = None if host_us is None else host_us * 1e-6
    return Cost(device_s=device_us * 1e-6, host_s=host_s, is_optimizer=is_optimizer)


def plain(wall_us: float, host_us: float) -> Plain:
    return Plain(wall_s=wall_us * 1e-6, host_s=host_us * 1e-6)


def test_a_launch_bound_step_costs_its_launches() -> None:
    found = attribute([cost(2, 5), cost(6, 15)] * 50, plain(5000, 5000), None, is_apart=False)
    assert [one.device_s for one in found[:2]] == pytest.approx([2e-6, 6e-6])
    assert [one.host_s for one in found[:2]] == pytest.approx([45e-6, 55e-6])  # 80 µs between the calls, shared out
    assert choose_seconds(found)[:2] == pytest.approx([45e-6, 55e-6], rel=0.01)


def test_a_device_bound_step_costs_what_the_device_takes() -> None:
    found = attribute([cost(200, 5), cost(600, 15)] * 50, plain(50_000, 2000), None, is_apart=False)
    assert choose_seconds(found)[:2] == pytest.approx([250e-6, 750e-6])
    assert sum(one.host_s or 0 for one in found) == pytest.approx(2000e-6)


def test_what_the_device_waits_for_in_forward_is_no_time_of_its_own() -> None:
    watched = [replace(cost(4, 5), is_forward=True)] * 50 + [cost(20, 2)] * 50
    found = attribute(watched, plain(1610, 650), None, is_apart=False)
    forward, backward = found[:50], found[50:]
    assert sum(one.host_s or 0 for one in forward) == pytest.approx(475e-6)  # 250, and three quarters of 300 between
    assert sum(one.device_s for one in found) < 1400e-6
    assert sum(one.device_s for one in backward) == pytest.approx(1610e-6 - 475e-6, rel=0.02)
    assert sum(choose_seconds(found)) == pytest.approx(1610e-6)


def test_the_hosts_time_of_backward_is_shared_by_the_calls_of_backward() -> None:
    watched = [replace(cost(4, 5), is_forward=True)] * 50 + [cost(4, 2)] * 100 + [cost(4, 1, is_optimizer=True)]
    timed = replace(plain(1200, 1200), backward_s=700e-6)
    found = attribute(watched, timed, None, is_apart=False)
    forward, backward = found[:50], found[50:150]
    assert sum(one.host_s or 0 for one in backward) == pytest.approx(700e-6)
    assert sum(one.host_s or 0 for one in forward) == pytest.approx(500e-6, rel=0.01)
    assert sum(choose_seconds(found)) == pytest.approx(1200e-6, rel=0.01)


def test_a_host_that_waits_for_the_device_does_not_count_the_wait_as_its_own() -> None:
    watched = [cost(100, 5)] * 9 + [replace(cost(100, 5), is_read=True)] + [cost(1, 5)] * 10
    found = attribute(watched, plain(1110, 1100), None, is_apart=False)
    assert sum(one.host_s or 0 for one in found) < 400e-6
    assert sum(choose_seconds(found)) == pytest.approx(1110e-6, rel=0.03)


def test_a_host_that_was_slower_while_it_was_watched_is_scaled_down() -> None:
    found = attribute([cost(1, 30), cost(1, 90)], plain(60, 60), None, is_apart=False)
    assert [one.host_s for one in found] == pytest.approx([15e-6, 45e-6])


def test_on_the_host_calls_share_the_time_of_the_step() -> None:
    found = attribute([cost(10), cost(30)], plain(60, 60), None, is_apart=False)
    assert choose_seconds(found) == pytest.approx([15e-6, 45e-6])
    assert [one.host_s for one in found] == [None, None]


def test_an_optimizer_that_was_timed_apart_is_scaled_apart() -> None:
    calls = [*[cost(100, 10)] * 50, cost(10, 5, is_optimizer=True)]
    found = attribute(calls, plain(10_000, 1000), plain(400, 8), is_apart=True)
    assert sum(choose_seconds(found)) == pytest.approx(10_400e-6, rel=0.01)
    assert found[-1].device_s == pytest.approx(392e-6)


def test_an_optimizer_that_was_not_timed_stays_as_estimated() -> None:
    calls = [*[cost(100, 10)] * 50, cost(10, 5, is_optimizer=True)]
    found = attribute(calls, plain(10_000, 1000), None, is_apart=True)
    assert found[-1] == calls[-1]


def test_a_step_whose_body_waits_for_the_host_and_whose_optimizer_does_not_takes_both() -> None:
    calls = [*[cost(2, 10)] * 50, cost(10, 5, is_optimizer=True)]
    found = attribute(calls, plain(1000, 1000), plain(900, 10), is_apart=True)
    assert sum(choose_seconds(found)) == pytest.approx(1900e-6, rel=0.01)


def test_calls_that_take_no_time_share_what_there_is() -> None:
    assert choose_seconds(attribute([cost(0), cost(0)], plain(10, 10), None, is_apart=False)) == pytest.approx(
        [5e-6, 5e-6]
    )


def test_no_calls_cost_nothing() -> None:
    assert attribute([], plain(10, 10), None, is_apart=False) == []
