"""Regions whose arguments wait elsewhere: `offload_inputs`, and where to: `offload_to`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect import Decision, Site
from recollect._apply.options import parse_choices
from recollect._offload.offload import Offload, offload_decided
from tests.models import GPT
from tests.offload.shelf import Shelf

pytestmark = pytest.mark.filterwarnings("ignore:offloading to .* makes each step wait")  # such small steps do


def to_disk(folder: Path) -> Offload:
    return recollect.offload(tier="disk", directory=folder, min_bytes=0)


def layer(x: Tensor) -> Tensor:
    return x.sin().exp().clamp(max=1).mul(x)


def gradient(call: Callable[[Tensor], Tensor], steps: int = 4) -> Tensor:
    for _ in range(steps):
        x = torch.linspace(-1, 1, 96).requires_grad_()
        y = x * 1
        for _ in range(4):
            y = call(y)
        y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_arguments_wait_elsewhere_and_nothing_else_does(tmp_path: Path) -> None:
    away = to_disk(tmp_path)
    call = recollect.checkpoint(layer, offload_inputs=True, offload_to=away)
    y = torch.ones(96, requires_grad=True) * 1
    for _ in range(4):
        y = call(y)
    assert len(away._session._step.parcels) == 4  # type: ignore[union-attr]
    y.sum().backward()
    assert torch.equal(gradient(call), gradient(layer))
    assert away.report().stayed_bytes + away.report().out_bytes == 4 * 96 * 4


def test_the_options_work_as_a_decorator_and_in_rules(tmp_path: Path) -> None:
    @recollect.checkpoint(offload_inputs=True, offload_to="disk", name="decorated")
    def decorated(x: Tensor) -> Tensor:
        return layer(x)

    assert torch.equal(gradient(decorated, 1), gradient(layer, 1))
    torch.manual_seed(0)
    model, ids = GPT(), torch.randint(0, 8, (2, 6))

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(ids).float().square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    rules: dict[str, Any] = {"layers.*": {"offload_inputs": True, "offload_to": to_disk(tmp_path)}}
    with recollect.apply(model, rules) as handle:
        for _ in range(4):
            assert all(torch.equal(one, other) for one, other in zip(gradients(), plain, strict=True))
        assert handle.report().values + handle.report().stayed_bytes > 0
        assert handle.report().tier == "disk"
        assert "recompute (offload_inputs=True" in str(handle)


def test_what_a_policy_offloads_goes_to_the_tier_of_the_region() -> None:
    def offload_sines(site: Site) -> Decision:
        return Decision.OFFLOAD if site.op.startswith("aten.sin") else Decision.RECOMPUTE

    shelf = Shelf()
    away = recollect.offload(tier=shelf, min_bytes=0)
    call = recollect.checkpoint(layer, policy=offload_sines, offload_to=away)
    assert torch.equal(gradient(call), gradient(layer))
    assert away.report().tier == "shelf"
    assert away.report().steps > 0
    assert shelf.values == {}


def test_without_gradients_nothing_is_sent(tmp_path: Path) -> None:
    away = to_disk(tmp_path)
    call = recollect.checkpoint(layer, offload_inputs=True, offload_to=away)
    with torch.no_grad():
        call(torch.ones(96))
    grads = torch.func.grad(lambda x: call(x).sum())(torch.ones(96))
    assert torch.equal(grads, torch.func.grad(lambda x: layer(x).sum())(torch.ones(96)))
    assert away._session._step is None


def test_regions_of_one_tier_share_one_timetable() -> None:
    both = [parse_choices(offload_inputs=True, offload_to=tier).elsewhere for tier in ("disk", "disk")]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].offload().hooks == both[1].offload().hooks
    assert both[0].offload().hooks == offload_decided("disk").hooks
    assert both[0].offload().hooks != offload_decided().hooks


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"offload_inputs": "disk"},
            r"offload_inputs='disk': expected True or False. To choose the tier, pass offload_to=",
        ),
        (
            {"offload_to": "tape", "offload_inputs": True},
            r"offload_to='tape': expected 'host', 'disk', \('host', 'disk'\)",
        ),
        (
            {"offload_to": "disk"},
            r"offload_to='disk' has no effect: this region offloads nothing. Pass offload_inputs=True",
        ),
        ({"offload_to": ("disk", "host"), "offload_inputs": True}, r"offload_to=\('disk', 'host'\): a chain has two"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        recollect.checkpoint(layer, **options)
