"""How fast graphs are taken to run when their transfers are planned."""

from collections.abc import Iterator

import pytest
import torch

from recollect._compile import speeds
from recollect._core.calls import OpCall, Value
from recollect._profile.links import Link


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """An H200 by name, on which one product takes twice the estimate, and whose link carries 10 and 20 GB/s."""
    known = speeds.find_device("H200")
    links = [Link(name="up", bytes_per_s=10e9), Link(name="down", bytes_per_s=20e9)]
    product_s = 2 * speeds.estimate_s(speeds._make_product(), known)
    monkeypatch.setattr(speeds, "find_device", lambda device: known)
    monkeypatch.setattr(speeds, "measure_pinned", lambda device: links)
    monkeypatch.setattr(speeds, "_measure_product_s", lambda device: product_s)
    speeds.carrier_of.cache_clear()
    yield torch.device("cuda")
    speeds.carrier_of.cache_clear()


def test_kernels_are_estimated_at_the_pace_of_a_measured_product(device: torch.device) -> None:
    value = Value(storage=0, shape=(1024, 1024), dtype="bfloat16", bytes=2**21)
    call = OpCall(op="aten.mm.default", inputs=(value, value), outputs=(Value(storage=1, bytes=2**21),), flops=2**31)
    known = speeds.find_device("H200")
    assert speeds.carrier_of(device).seconds_of(call) == 2 * (speeds.estimate_s(call, known) - known.launch_s)


def test_a_link_is_taken_to_carry_less_than_its_slower_way_does(device: torch.device) -> None:
    assert speeds.carrier_of(device).bytes_per_s == speeds._LINK_SHARE * 10e9


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
    speeds.carrier_of.cache_clear()
    assert speeds.carrier_of(device).bytes_per_s > 0
    assert torch.equal(torch.cuda.get_rng_state(), before)
