"""Regions and policies that offload, on a real device: gradients, memory, streams, and events that are used again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, Site
from recollect._core.torch_private.streams import stream_reader
from recollect._offload import streams
from recollect._offload.offload import Offload, offload_decided
from recollect._offload.streams import DeviceClock
from tests.waiting import refusing_to_wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("collector_off", "own_pool"),
    pytest.mark.filterwarnings("ignore:offloading to .* makes each step wait"),
]

STEPS = 6
Call = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A layer that saves several times its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + grown


@pytest.fixture
def blocks(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(512) for _ in range(8)).to(device)


def train(blocks: nn.ModuleList, wrap: Callable[[nn.Module], Call], rows: int = 8192) -> list[Tensor]:
    torch.manual_seed(1)
    blocks.zero_grad(set_to_none=False)  # the peak is then that of activations, not where gradients are made last
    first = next(blocks.parameters())
    x = torch.randn(rows, 512, device=first.device).requires_grad_() * 1
    for block in blocks:
        x = wrap(block)(x)
    x.square().mean().backward()
    return [parameter.grad.clone() for parameter in blocks.parameters() if parameter.grad is not None]


def plainly(block: nn.Module) -> Call:
    return block


def peak_of(blocks: nn.ModuleList, wrap: Callable[[nn.Module], Call], device: torch.device) -> int:
    for _ in range(4):
        train(blocks, wrap)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats(device)
    train(blocks, wrap)
    return torch.accelerator.max_memory_allocated(device)


def assert_nothing_is_left(away: Offload) -> None:
    transfers = away._session.transfers
    assert transfers.leaving_bytes == 0
    assert transfers.host is None or transfers.host.pool.used_bytes == 0


def offload_products(site: Site) -> Decision:
    return Decision.OFFLOAD if site.op.startswith(("aten.addmm", "aten.mm")) else Decision.RECOMPUTE


def mix(site: Site) -> Decision:
    if site.op.startswith("aten.gelu"):
        return Decision.SAVE
    return offload_products(site)


@pytest.mark.parametrize("policy", [offload_products, mix])
@pytest.mark.parametrize("to", [None, "host", "disk"])
def test_gradients_under_a_policy_that_offloads_are_those_of_the_plain_step(
    blocks: nn.ModuleList, policy: Callable[[Site], Decision], to: Any
) -> None:
    plain = train(blocks, plainly)
    for _ in range(STEPS):
        ours = train(blocks, lambda block: recollect.checkpoint(block, policy=policy, offload_to=to))
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    away = offload_decided(to)
    assert away.report().out_bytes + away.report().stayed_bytes > 0
    assert_nothing_is_left(away)


def test_what_a_policy_offloads_is_gone_from_the_peak(blocks: nn.ModuleList, device: torch.device) -> None:
    def save_products(site: Site) -> Decision:
        return Decision.SAVE if site.op.startswith(("aten.addmm", "aten.mm")) else Decision.RECOMPUTE

    away = recollect.offload(in_flight="32MiB")
    saved = peak_of(blocks, lambda block: recollect.checkpoint(block, policy=save_products), device)
    offloaded = peak_of(
        blocks, lambda block: recollect.checkpoint(block, policy=offload_products, offload_to=away), device
    )
    assert saved - offloaded > 0.4 * away.report().out_bytes


@pytest.mark.parametrize("to", ["host", "disk"])
def test_gradients_with_arguments_elsewhere_are_those_of_the_plain_step(blocks: nn.ModuleList, to: str) -> None:
    plain = train(blocks, plainly)
    for _ in range(STEPS):
        ours = train(blocks, lambda block: recollect.checkpoint(block, offload_inputs=True, offload_to=to))
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert_nothing_is_left(offload_decided(to))


def test_arguments_of_regions_are_gone_from_the_peak(blocks: nn.ModuleList, device: torch.device) -> None:
    away = recollect.offload()
    full = peak_of(blocks, lambda block: recollect.checkpoint(block), device)
    ours = peak_of(blocks, lambda block: recollect.checkpoint(block, offload_inputs=True, offload_to=away), device)
    assert away.report().out_bytes > 0
    assert full - ours > 0.7 * away.report().out_bytes


def test_in_the_steady_state_regions_never_let_the_host_wait(
    blocks: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrap(block: nn.Module) -> Call:
        return recollect.checkpoint(block, offload_inputs=True)

    for _ in range(STEPS):
        train(blocks, wrap)

    def wait(*_: Any) -> None:
        raise AssertionError("the host waited")

    monkeypatch.setattr(DeviceClock, "wait", wait)
    with refusing_to_wait():
        train(blocks, wrap)


def test_events_that_are_used_again_stand_for_later_points(
    blocks: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_EVENTS", 2)
    away = recollect.offload(min_bytes=0, in_flight="64MiB")
    plain = train(blocks, plainly)

    def step() -> list[Tensor]:
        with away:
            return train(blocks, plainly)

    for _ in range(STEPS):
        assert all(torch.equal(one, other) for one, other in zip(step(), plain, strict=True))
    assert_nothing_is_left(away)


def test_values_of_every_layout_come_back_as_they_were(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.GELU(), nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(16 * 20 * 20, 64)
    )
    net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    cell = nn.GRUCell(64, 64).to(device)
    x = torch.randn(32, 16, 24, 24, device=device).to(memory_format=torch.channels_last)
    away = recollect.offload(min_bytes=0, in_flight="8MiB")

    def step(context: Any) -> list[Tensor]:
        net.zero_grad()
        cell.zero_grad()
        with context:
            y = net(x.clone().requires_grad_() * 1)
            for _ in range(3):
                y = cell(y, y.tanh())
        y.square().mean().backward()
        return [parameter.grad.clone() for parameter in (*net.parameters(), *cell.parameters())]  # type: ignore[union-attr]

    plain = step(torch.enable_grad())
    for _ in range(STEPS):  # convolutions may add up in another order
        pairs = zip(step(away), plain, strict=True)
        assert all(torch.allclose(one, other, rtol=1e-3, atol=1e-6) for one, other in pairs)


def test_the_stream_that_computes_is_told_for_each_thread_and_context(device: torch.device) -> None:
    read = stream_reader(device)
    outside = read()
    side = torch.Stream(device)
    with side:
        assert read() == side
        assert read() is read()
    assert read() == outside
    assert read() is outside
