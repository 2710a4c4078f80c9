"""What operators take beside their results is read off the allocator, for each kind of arguments."""

from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect._core.operators import operator_of
from recollect._inspect import step as profiling
from recollect._profile.allocations import AllocationMeter, meter_on

MM = operator_of(torch.ops.aten.mm.default)
VIEW = operator_of(torch.ops.aten.view.default)
CONVOLUTION = operator_of(torch.ops.aten.convolution.default)


class Allocator:
    """Says what it is told to say."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.resets = 0

    def take(self, kept: int, beside: int) -> None:
        self.most = max(self.most, self.now + kept + beside)
        self.now += kept

    def read(self) -> tuple[int, int]:
        return self.now, self.most

    def reset(self) -> None:
        self.most, self.resets = self.now, self.resets + 1

    def meter(self) -> AllocationMeter:
        return AllocationMeter(self.read, self.reset)


def run(allocator: Allocator, meter: AllocationMeter, *args: Any, kept: int, beside: int) -> int | None:
    key = meter.begin(MM, args, {})
    allocator.take(kept, beside)
    return None if key is None else meter.end(key)


def test_what_an_operator_gives_back_is_its_own_whatever_was_in_use_before() -> None:
    allocator = Allocator()
    meter = allocator.meter()
    allocator.take(100, 1000)
    x = torch.ones(2, 2)
    assert run(allocator, meter, x, x, kept=16, beside=24) == 24
    assert meter.peak_bytes == 1100


def test_the_same_operator_on_the_same_shapes_is_measured_twice_and_the_less_counts() -> None:
    allocator = Allocator()
    meter = allocator.meter()
    x, wide = torch.ones(2, 2), torch.ones(2, 4)
    assert [run(allocator, meter, x, x, kept=16, beside=each) for each in (99, 24, 1)] == [99, 24, 24]
    assert run(allocator, meter, x, wide, kept=32, beside=7) == 7
    assert run(allocator, meter, x, wide.t(), kept=32, beside=9) == 9
    assert run(allocator, meter, x.half(), x.half(), kept=32, beside=5) == 5
    assert allocator.resets == 5
    meter.start()
    assert meter.peak_bytes == 0
    assert run(allocator, meter, x, x, kept=16, beside=1) == 24


def test_an_allocator_that_tells_nothing_leaves_it_to_the_rules() -> None:
    meter = AllocationMeter(lambda: (0, 0), lambda: None)
    key = meter.begin(MM, (torch.ones(2, 2), torch.ones(2, 2)), {})
    assert key is not None
    assert meter.end(key) is None
    assert meter_on(torch.device("cpu")) is None


def test_views_and_convolutions_that_try_kernels_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, image = Allocator().meter(), torch.ones(1, 1, 4, 4)
    assert meter.begin(VIEW, (image, [16]), {}) is None
    assert meter.begin(CONVOLUTION, (image, image), {}) is not None
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert meter.begin(CONVOLUTION, (image, image), {}) is None


def test_profiles_have_what_was_measured_and_not_of_optimizers_on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()

    class Meter(AllocationMeter):
        def end(self, key: tuple[Any, ...]) -> int | None:
            allocator.take(8, 1000)
            return super().end(key)

    monkeypatch.setattr(profiling, "meter_on", lambda _: Meter(allocator.read, allocator.reset))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    seen = recollect.profile(model, torch.ones(2, 4), optimizer=torch.optim.SGD)
    taken = {call.op: call.workspace_bytes for call in seen.calls}
    assert taken["aten.tanh.default"] == taken["aten.tanh_backward.default"] == 1000
    assert taken["aten.t.default"] == 0
    assert {call.workspace_bytes for call in seen.calls if call.phase.value == "optimizer"} == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_convolution_takes_on_the_device_what_the_allocator_says(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(64, 96, 3, padding=1), nn.GroupNorm(8, 96), nn.SiLU(), nn.Conv2d(96, 64, 3))
    model = model.to("cuda", dtype)
    image = torch.randn(8, 64, 48, 48, device="cuda", dtype=dtype)
    recollect.profile(model, image)
    seen = recollect.profile(model, image)
    allocated = seen.allocators[0].peak_bytes
    assert abs(seen.peak_bytes - allocated) <= 0.02 * allocated  # of all that the process holds
    assert any("convolution" in call.op and call.workspace_bytes for call in seen.calls)
