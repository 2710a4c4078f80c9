"""How fast graphs are taken to run when their transfers are planned."""

from collections.abc import Callable, Iterator

import pytest
import torch

from recollect._compile import speeds
from recollect._core.calls import OpCall, Value
from recollect._profile.dry.roofline import estimate_s, find_device
from recollect._profile.links import Link

DEVICE = torch.device("cuda")


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """An H200 by name, whose link carries 10 and 20 GB/s; says how long a product takes, in estimates."""
    known = find_device("H200")
    links = [Link(name="up", bytes_per_s=10e9), Link(name="down", bytes_per_s=20e9)]
    product_s = estimate_s(speeds._make_product(), known)
    monkeypatch.setattr(speeds, "find_device", lambda device: known)
    monkeypatch.setattr(speeds, "measure_pinned", lambda device: links)

    def set_pace(pace: float) -> None:
        monkeypatch.setattr(speeds, "_measure_product_s", lambda device: pace * product_s)
        speeds._carrier_of.cache_clear()

    set_pace(1.0)
    yield set_pace
    speeds._carrier_of.cache_clear()


@pytest.mark.parametrize(("measured", "counts"), [(0.5, 0.5), (0.9, 0.8), (7.0, 0.8)])
def test_a_quick_product_makes_estimates_shorter_and_a_slow_one_may_be_a_busy_device(
    take: Callable[[float], None], measured: float, counts: float
) -> None:
    take(measured)
    value = Value(storage=0, shape=(1024, 1024), dtype="bfloat16", bytes=2**21)
    call = OpCall(op="aten.mm.default", inputs=(value, value), outputs=(Value(storage=1, bytes=2**21),), flops=2**31)
    known = find_device("H200")
    expected = counts * (estimate_s(call, known) - known.launch_s)
    assert speeds.carrier_of(DEVICE).seconds_of(call) == pytest.approx(expected)


@pytest.mark.usefixtures("take")
def test_a_link_is_taken_to_carry_less_than_its_slower_way_does() -> None:
    assert speeds.carrier_of(DEVICE).bytes_per_s == speeds._LINK_SHARE * 10e9


@pytest.mark.usefixtures("take")
def test_of_several_processes_none_measures_what_others_would_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert speeds.carrier_of(DEVICE).bytes_per_s == speeds._LINK_SHARE * speeds._TYPICAL_LINK
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    assert speeds.carrier_of(DEVICE).bytes_per_s == speeds._LINK_SHARE * 10e9


def test_the_best_round_of_products_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 8.0, 10.0, 14.0, 20.0, 26.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    for name, value in (("_SIDE", 4), ("_IN_A_ROW", 2), ("_ROUNDS", 3)):
        monkeypatch.setattr(speeds, name, value)
    before = torch.get_rng_state()
    assert speeds._measure_product_s(torch.device("cpu")) == 2.0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_measuring_a_device_draws_no_random_numbers() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state()
    speeds._carrier_of.cache_clear()
    assert speeds.carrier_of(device).bytes_per_s > 0
    assert torch.equal(torch.cuda.get_rng_state(), before)
