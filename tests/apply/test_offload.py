"""Rules that offload: whole modules send what they save for backward away, inside regions and around them."""

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision
from recollect._core.forecasts import PlannedRegion
from recollect._offload.offload import Offload
from tests.models import GPT

RECOMPUTE, SAVE, OFFLOAD = Decision.RECOMPUTE, Decision.SAVE, Decision.OFFLOAD
WITHOUT_DEVICE = "ignore:values that are already in host memory:UserWarning"


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # there is dropout
    model.zero_grad()
    model(ids).float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def gpt() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = GPT()
    return model, torch.randint(0, 8, (2, 6))


def to_disk(folder: Path) -> Offload:
    return recollect.offload(tier="disk", directory=folder, min_bytes=0)


def is_empty_soon(away: Offload) -> bool:
    """Whether nothing remains on the disk. A copy on its way when its value goes gives its place back later."""
    disk: Any = away._session.transfers.slow
    for _ in range(500):
        if disk.used_bytes == 0:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    "rules",
    [
        lambda away: {"layers.*": away},
        lambda away: {"layers.0": away, "layers.1": RECOMPUTE},
        lambda away: {"layers.*": RECOMPUTE, "layers.*.mlp": away},
        lambda away: {"layers.*": away, "layers.*.attn": RECOMPUTE},
        lambda away: {"layers.*.attn": SAVE, "layers.*": away},
        lambda away: away,
    ],
)
@pytest.mark.filterwarnings("ignore:offloading to disk")
def test_gradients_are_those_of_the_plain_model(gpt: tuple[nn.Module, Tensor], rules: Any, tmp_path: Path) -> None:
    model, ids = gpt
    plain = gradients(model, ids)
    away = to_disk(tmp_path)
    with recollect.apply(model, rules(away)) as handle:
        for step in range(4):
            ours = gradients(model, ids)
            assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
            assert step > 0 or handle.report().out_bytes > 0  # later what cannot be back in time stays
    assert "forward" not in vars(model.layers[0])  # type: ignore[index]
    assert is_empty_soon(away)


def test_a_module_that_is_saved_inside_an_offloaded_one_stays(gpt: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, ids = gpt
    sizes = []
    both: list[dict[str, Any]] = [
        {"layers.*": to_disk(tmp_path)},
        {"layers.*.mlp": SAVE, "layers.*": to_disk(tmp_path)},
    ]
    for rules in both:
        with recollect.apply(model, rules) as handle:
            gradients(model, ids)
            sizes.append(handle.report().out_bytes)
    assert 0 < sizes[1] < sizes[0]


def test_the_handle_says_what_is_offloaded(gpt: tuple[nn.Module, Tensor]) -> None:
    model, _ = gpt
    with recollect.apply(model, {"layers.*.mlp": SAVE, "layers.*": OFFLOAD}) as handle:
        text = str(handle)
    assert "offloaded" in text.splitlines()[0]
    assert "offload to host" in text
    assert handle.places[0].is_sent


@pytest.mark.filterwarnings(WITHOUT_DEVICE)
def test_the_decision_shares_one_offload_among_its_modules(gpt: tuple[nn.Module, Tensor]) -> None:
    model, ids = gpt
    with recollect.apply(model, {"layers.0": OFFLOAD, "layers.1": OFFLOAD}) as handle:
        gradients(model, ids)
        gradients(model, ids)
        assert handle.report().tier == "host"
    with recollect.apply(model, OFFLOAD) as handle:
        gradients(model, ids)
        assert handle.report().steps <= 1


def test_a_deep_copy_is_offloaded_too(gpt: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    model, ids = gpt
    away = to_disk(tmp_path)
    with recollect.apply(model, {"layers.*": away}):
        twin = copy.deepcopy(model)
    gradients(twin, ids)
    assert away.report().out_bytes > 0
    recollect.remove(twin)
    assert "forward" not in vars(twin.layers[0])  # type: ignore[index]


def test_results_that_the_next_layer_still_reads_are_sent_all_the_same(tmp_path: Path) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)])
    x = torch.randn(32, 16)
    away = recollect.offload(tier="disk", directory=tmp_path, min_bytes=0, in_flight=1)
    with recollect.apply(net, {"*": away}):
        net(x).sum().backward()
    assert away.report().values >= 4


def test_a_report_is_of_one_offload(gpt: tuple[nn.Module, Tensor]) -> None:
    model, _ = gpt
    with (
        recollect.apply(model, {"layers.*": RECOMPUTE}) as handle,
        pytest.raises(ValueError, match=r"^no rule offloads anything, so there is nothing to report$"),
    ):
        handle.report()
    rules = {"layers.0": recollect.offload(tier="disk"), "layers.1": recollect.offload(tier="disk")}
    with (
        recollect.apply(model, rules) as handle,
        pytest.raises(ValueError, match=r"^the rules hold 2 offloads: call report"),
    ):
        handle.report()


def test_a_module_is_offloaded_once(gpt: tuple[nn.Module, Tensor]) -> None:
    model, _ = gpt
    with (
        recollect.apply(model, {"layers.*": OFFLOAD}),
        pytest.raises(
            ValueError, match=r"module 'layers.0' \(Block\) cannot be offloaded: an earlier recollect.apply offloads it"
        ),
    ):
        recollect.apply(model, {"layers.*": OFFLOAD})


@pytest.mark.filterwarnings("ignore:offloading to disk")
def test_a_plan_that_sends_looks_for_what_has_left_after_other_blocks_and_regions(
    gpt: tuple[Any, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = gpt
    plain = gradients(model, ids)
    passed: list[int] = []
    monkeypatch.setattr(Offload, "pass_by", lambda self: passed.append(id(self)))
    block, head = type(model.layers[0]).__name__, type(model.norm).__name__
    plan = recollect.Plan(
        regions=(
            PlannedRegion(path="layers.0", kind=block, way="offload", tier="disk"),
            PlannedRegion(path="norm", kind=head, way="rerun"),
        )
    )
    with recollect.apply(model, plan) as handle:
        assert [place.name for place in handle.places] == ["layers.0", "norm"]
        ours = gradients(model, ids)
        assert len(passed) == len(model.layers)  # the other blocks, and the region
        assert len(set(passed)) == 1
        with pytest.raises(ValueError, match=r"'layers.0' .* offloads it already"):
            recollect.apply(model, {"layers.0": OFFLOAD})
        with recollect.apply(model, {"layers.1": OFFLOAD}):  # which only looks on
            pass
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
