"""Offloading on a real device: gradients, memory, streams, and what the host does not wait for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._offload.offload import Offload
from recollect._offload.streams import DeviceClock
from tests.offload.packed import parcel_of
from tests.waiting import refusing_to_wait

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("collector_off", "own_pool")]

MIB = 2**20


class Net(nn.Module):
    """Layers whose values are large for what they compute, with views, masks and buffers among them."""

    scale: Tensor

    def __init__(self, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.register_buffer("scale", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            a, b, c = layer(x).chunk(3, -1)
            y = torch.nn.functional.dropout(a.sigmoid() * b.t().contiguous().t(), 0.1) * self.scale
            x = x + torch.where(c > 0, y, y.exp().clamp(max=1))
        return x


@pytest.fixture
def net(device: torch.device) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().to(device), torch.randn(2048, 512, device=device)


def gradients(net: nn.Module, x: Tensor, context: AbstractContextManager[Any]) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    with context:
        loss = net(x).square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


OFFLOADS: dict[str, Callable[[Path], Offload]] = {
    "host": lambda _: recollect.offload(min_bytes=0),
    "hidden": lambda _: recollect.offload(min_bytes=0, wait=False),
    "little in flight": lambda _: recollect.offload(min_bytes=0, in_flight="5MiB"),
    "disk": lambda folder: recollect.offload(tier="disk", directory=folder, min_bytes=0, in_flight="20MiB"),
    "chain": lambda folder: recollect.offload(
        tier=("host", "disk"), directory=folder, min_bytes=0, limit="32MiB", in_flight="20MiB"
    ),
    "recomputed": lambda _: recollect.offload(min_bytes=0),
}


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.filterwarnings("ignore:offloading to")
def test_gradients_are_those_of_the_plain_step(net: tuple[Net, Tensor], kind: str, tmp_path: Path) -> None:
    model, x = net
    plain = gradients(model, x, nullcontext())
    away = OFFLOADS[kind](tmp_path)
    handle = recollect.apply(model, {"layers.*": recollect.Decision.RECOMPUTE}) if kind == "recomputed" else None
    for _ in range(6):
        ours = gradients(model, x, away)
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    if handle is not None:
        handle.remove()
    transfers = away._session.transfers
    assert transfers.leaving_bytes == 0
    assert transfers.host is None or transfers.host.pool.used_bytes == 0
    assert transfers._staging.pool.used_bytes == 0


@pytest.mark.filterwarnings("ignore:offloading to host makes each step wait")  # where other tests share the link
def test_the_peak_is_lower(net: tuple[Net, Tensor], device: torch.device) -> None:
    model, x = net
    away = recollect.offload(in_flight="16MiB")

    def peak(context: AbstractContextManager[Any]) -> int:
        for _ in range(4):
            gradients(model, x, context)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats(device)
        gradients(model, x, context)
        return torch.accelerator.max_memory_allocated(device)

    plain, ours = peak(nullcontext()), peak(away)
    assert plain - ours > 0.5 * away.report().out_bytes


@pytest.mark.filterwarnings("ignore:offloading to host makes each step wait")  # where others use the link, too
def test_nothing_is_left_on_the_device(net: tuple[Net, Tensor], device: torch.device) -> None:
    model, x = net
    away = recollect.offload()
    gradients(model, x, away)
    model.zero_grad()
    before = torch.accelerator.memory_allocated(device)
    for _ in range(3):
        gradients(model, x, away)
        with away:
            model(x)  # backward never comes
        with pytest.raises(ZeroDivisionError), away:
            1 / int(model(x).sum().item() * 0)
    model.zero_grad()
    assert torch.accelerator.memory_allocated(device) == before


@pytest.mark.filterwarnings("ignore:offloading to host makes each step wait")  # as quick a device as that
def test_in_the_steady_state_nothing_is_pinned_and_the_host_does_not_wait(
    net: tuple[Net, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net
    away = recollect.offload()
    host = away._session.transfers.host
    assert host is not None
    counts = []
    for _ in range(6):
        gradients(model, x, away)
        counts.append(host.pool.allocations)
    assert counts[1:] == [counts[1]] * 5

    def wait(*_: Any) -> None:
        raise AssertionError("the host waited")

    monkeypatch.setattr(DeviceClock, "wait", wait)
    with refusing_to_wait():
        gradients(model, x, away)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # in the plain step too
@pytest.mark.filterwarnings("ignore:offloading to host makes each step wait")  # with so little in flight it does
def test_values_of_the_users_own_streams_are_right(device: torch.device) -> None:
    weight = (torch.randn(1024, 1024, device=device) / 32).requires_grad_()  # so that no power is infinite
    x = torch.randn(1024, 1024, device=device)

    def step(context: AbstractContextManager[Any]) -> Tensor:
        side = torch.cuda.Stream(device)
        weight.grad = None
        with context:
            y = (x @ weight).sin()
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                z = ((y @ weight).exp().clamp(max=1) @ weight).tanh()
                z.record_stream(torch.cuda.current_stream(device))
            torch.cuda.current_stream(device).wait_stream(side)
            loss = (z * y).sum()
        loss.backward()
        assert weight.grad is not None
        return weight.grad.clone()

    plain = step(nullcontext())
    away = recollect.offload(in_flight="4MiB")
    for _ in range(8):
        assert torch.equal(step(away), plain)


def test_strides_and_alignment_come_back(device: torch.device) -> None:
    away = recollect.offload(min_bytes=0)
    pack, unpack = away.hooks
    base = torch.randn(64, 3, 128, device=device).requires_grad_() * 1
    views = [base, base[:, 1], base.transpose(0, 2), base.permute(2, 0, 1)[::2], base[:1].expand(5, 3, 128)]
    handles = [pack(view) for view in views]
    away.settle()
    expected = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    for handle in handles:
        away._session.transfers.release([parcel_of(handle)])
    del base, views
    back = [unpack(handle) for handle in handles]
    assert [view.stride() for view in back] == strides
    assert all(torch.equal(one, other) for one, other in zip(back, expected, strict=True))
    assert all(view.untyped_storage().data_ptr() % 16 == 0 for view in back)


def test_a_captured_graph_keeps_its_values(device: torch.device) -> None:
    x = torch.randn(256, 256, device=device, requires_grad=True)
    away = recollect.offload(min_bytes=0)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        x.sin().exp().sum().backward()
    torch.cuda.synchronize()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), away:
        x.sin().exp().sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("compress", ["bf16", "fp8"])
def test_compressed_values_come_back_within_their_bound(device: torch.device, compress: str) -> None:
    away = recollect.offload(min_bytes=0, compress=compress)
    pack, unpack = away.hooks
    x = torch.randn(1024, 64, device=device).requires_grad_() * 1
    expected = x.detach().clone()
    handle = pack(x)
    away.settle()
    away._session.transfers.release([parcel_of(handle)])
    del x
    error = (unpack(handle) - expected).abs()
    bound = expected.abs() / (256 if compress == "bf16" else 16)
    assert bool((error <= bound.clamp_min(float(expected.abs().max()) / 2**18)).all())
