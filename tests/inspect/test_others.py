"""What else the process holds on the device: in peaks, plans, refusals and reports."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.calls import Category
from recollect._core.profiles import Profile
from recollect._inspect import others
from recollect._report.summary import find_peak
from recollect._report.verdict import judge_peak

MEBIBYTE = 2**20
FOREIGN = 64 * MEBIBYTE


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


class Told:
    """An allocator for the host: tells what a model takes between steps, and what else there is.

    Args:
        model: whose parameters and gradients are in use.
        inputs: are in use as well.
        foreign_bytes: what else is in use.
    """

    def __init__(self, model: nn.Module, *inputs: Tensor, foreign_bytes: int = FOREIGN) -> None:
        self.model, self.inputs, self.foreign_bytes = model, inputs, foreign_bytes
        self.kept: list[Tensor] = []

    def read(self, _: torch.device) -> int:
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        known = (*self.model.parameters(), *gradients, *self.inputs, *self.kept)
        storages = {id(one.untyped_storage()): one.untyped_storage().nbytes() for one in known}
        return sum(storages.values()) + self.foreign_bytes


Tell = Callable[[Told], Told]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    def patch(told: Told) -> Told:
        monkeypatch.setattr(others, "read_requested_bytes", told.read)
        return told

    return patch


def other_bytes(profile: Profile) -> int:
    return sum(one.bytes for one in profile.storages if one.category is Category.OTHER)


def test_what_the_step_does_not_use_is_part_of_its_peak(tell: Tell) -> None:
    model, x = small_model(), torch.randn(4, 8)
    alone = recollect.profile(model, x)
    tell(Told(model, x))
    seen = recollect.profile(model, x)
    assert other_bytes(alone) == 0
    assert other_bytes(seen) == FOREIGN
    assert seen.peak_bytes == alone.peak_bytes + FOREIGN
    assert Profile.from_json(seen.to_json()) == seen


def test_gradients_of_the_last_step_are_not_others(tell: Tell) -> None:
    """They are kept aside while a step that begins without any is profiled."""
    model, x = nn.Linear(1024, 1024), torch.randn(4, 1024)
    model(x).sum().backward()
    told = tell(Told(model, x, foreign_bytes=0))
    told.kept = [one.grad for one in model.parameters() if one.grad is not None]
    assert other_bytes(recollect.profile(model, x)) == 0


def test_what_the_garbage_collector_frees_is_not_there_in_later_steps(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = small_model(), torch.randn(4, 8)
    told = tell(Told(model, x))
    collect = gc.collect

    def free() -> int:
        told.foreign_bytes = 2 * MEBIBYTE
        return collect()

    monkeypatch.setattr(gc, "collect", free)
    assert other_bytes(recollect.profile(model, x)) == 2 * MEBIBYTE


def test_next_to_nothing_is_nothing(tell: Tell) -> None:
    model, x = small_model(), torch.randn(4, 8)
    tell(Told(model, x, foreign_bytes=MEBIBYTE // 2))
    assert other_bytes(recollect.profile(model, x)) == 0


def test_a_dry_profile_of_the_device_here_counts_them_and_of_a_named_one_does_not(tell: Tell) -> None:
    model, x = small_model(), torch.randn(4, 8)
    tell(Told(model, x))
    assert other_bytes(recollect.profile(model, x, dry=True)) == FOREIGN
    assert other_bytes(recollect.profile(model, x, dry=True, device="H100")) == 0


def test_a_refusal_and_a_report_name_them(tell: Tell) -> None:
    pytest.importorskip("scipy")
    model, x = small_model(), torch.randn(4, 8)
    tell(Told(model, x))
    seen = recollect.profile(model, x, optimizer=torch.optim.SGD)
    with pytest.raises(recollect.BudgetError, match=r"other tensors 64.00 MiB") as raised:
        recollect.plan(seen, budget="1MiB")
    assert "64.00 MiB of the peak are other tensors in this process" in str(raised.value)
    assert "delete those that you no longer need" in str(raised.value)
    assert any("64.00 MiB, are other tensors in this process" in said for said in judge_peak(find_peak(seen)))


@pytest.mark.gpu
@pytest.mark.parametrize("is_dry", [False, True])
def test_on_a_device_the_allocator_tells(*, is_dry: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4))).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    recollect.profile(model, x)  # libraries take their workspaces once
    gc.collect()
    alone = recollect.profile(model, x, dry=is_dry)
    teacher = torch.empty(FOREIGN, dtype=torch.uint8, device="cuda")
    seen = recollect.profile(model, x, dry=is_dry)
    assert other_bytes(seen) - other_bytes(alone) in range(FOREIGN - MEBIBYTE, FOREIGN + MEBIBYTE + 1)
    model(x).sum().backward()
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    result = model(x)  # a profile holds it, too
    result.sum().backward()
    measured = torch.cuda.max_memory_allocated()
    assert abs(seen.peak_bytes - measured) <= (0.03 if is_dry else 0.02) * measured
    del teacher, result
