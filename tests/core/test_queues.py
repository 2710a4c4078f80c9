"""Host and device work side by side, each in order."""

import random

import pytest

from recollect._core.calls import OpCall, Storage, Value
from recollect._core.queues import find_joins, queue


def play(host_s: list[float], device_s: list[float], joins: tuple[int, ...]) -> tuple[float, float, int]:
    """The same, call by call."""
    host = device = 0.0
    last = -1
    for number, (launch, run) in enumerate(zip(host_s, device_s, strict=True)):
        host += launch
        if host > device:
            last = number
        device = max(host, device) + run
        if number in joins and number < len(host_s) - 1:
            host = max(host, device)
    return host, max(host, device), last


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_comes_out_call_by_call(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 60)
    host_s, device_s = ([draw.random() for _ in range(count)] for _ in range(2))
    joins = tuple(sorted(draw.sample(range(count), k=min(count, draw.randrange(3)))))
    found = queue(host_s, device_s, joins)
    assert (found.host_s, found.wall_s) == pytest.approx(play(host_s, device_s, joins)[:2])
    assert found.last_wait == play(host_s, device_s, joins)[2]


def test_a_slow_forward_is_not_made_up_by_a_quick_backward() -> None:
    found = queue([10.0] * 10 + [1.0] * 10, [5.0] * 10 + [10.0] * 10)
    assert found.wall_s == pytest.approx(100 + 5 + 100)  # the busier of the two is busy for 150
    assert found.last_wait == 9


def test_a_device_that_is_always_busy_waits_for_nothing_but_the_first_launch() -> None:
    assert queue([1.0] * 10, [5.0] * 10).last_wait == 0


def test_a_step_without_calls_takes_no_time() -> None:
    assert queue([], []).wall_s == 0.0


def test_reading_a_result_is_a_join() -> None:
    calls = [OpCall(op=op) for op in ("aten.nonzero.default", "aten.add.Tensor", "aten.item.default")]
    assert find_joins(calls, []) == (0, 2)
    assert queue([1.0, 1.0], [5.0, 1.0], joins=(0,)).host_s == pytest.approx(7.0)


def test_nobody_waits_for_the_device_to_read_what_is_on_the_host() -> None:
    read = OpCall(op="aten._local_scalar_dense.default", inputs=(Value(storage=0),))
    assert find_joins([read], [Storage(bytes=4, device="cpu")]) == ()
    assert find_joins([read], [Storage(bytes=4)]) == (0,)
