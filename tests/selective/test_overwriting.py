"""Regions that write in place and update running statistics are replayed, if nothing else sees what is overwritten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect import policies
from recollect._profile.memory import LiveBytes
from tests.selective.comparing import assert_like_plain
from tests.watching import Operators

SIZE = 8
CONVOLUTIONS = policies.save_ops("aten.convolution.default")


class Bottleneck(nn.Module):
    """As in ResNet: batch norm, relu in place, a sum in place."""

    def __init__(self, *, activation: type[nn.Module] = nn.ReLU, **norm: Any) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(SIZE, 4, 1, bias=False), nn.BatchNorm2d(4, **norm)
        self.conv2, self.norm2 = nn.Conv2d(4, SIZE, 3, padding=1, bias=False), nn.BatchNorm2d(SIZE, **norm)
        self.act = activation(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x
        found: Tensor = self.act(y)
        return found


def image() -> tuple[Tensor]:
    return (torch.randn(2, SIZE, 6, 6, requires_grad=True),)


def way_of(target: Any) -> str:
    return " ".join(str(recollect.explain(target)).split())


def assert_replayed(region: Any) -> None:
    assert "recomputed by replaying" in way_of(region)


NORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "without statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Hardtanh, nn.LeakyReLU])
@pytest.mark.parametrize("twice", [False, True])
def test_batch_norm_and_activations_in_place(activation: type[nn.Module], norm: dict[str, Any], twice: bool) -> None:
    block = Bottleneck(activation=activation, **norm)
    assert_like_plain(block, CONVOLUTIONS, image, twice=twice, module=block)


def test_convolutions_do_not_run_again_and_statistics_are_updated_once() -> None:
    block = Bottleneck()
    region = recollect.checkpoint(block, policy=CONVOLUTIONS)
    for step in range(3):
        loss = region(*image()).square().sum()
        with Operators() as seen:
            loss.backward()
        assert not seen.all.count("convolution")
        assert seen.all.count("native_batch_norm") == 2
        assert block.norm1.num_batches_tracked == step + 1
    assert_replayed(region)


class PreActivated(nn.Module):
    """A norm comes first: its running mean is tensor number 1, and its flag is True."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(SIZE), nn.Conv2d(SIZE, 4, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, SIZE, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(torch.relu(self.norm2(self.conv1(torch.relu(self.norm1(x))))))
        return y + x


def test_a_region_that_begins_with_a_batch_norm_is_replayed() -> None:
    block = PreActivated()
    assert_like_plain(block, CONVOLUTIONS, image, module=block)
    region = recollect.checkpoint(block, policy=CONVOLUTIONS)
    region(*image()).sum().backward()
    assert_replayed(region)


def test_two_forwards_before_their_backwards() -> None:
    block = Bottleneck()
    region = recollect.checkpoint(block, policy=CONVOLUTIONS)
    x, y = image()[0], image()[0]
    found = []
    start = [buffer.clone() for buffer in block.buffers()]
    for fn in (block, region, region):
        with torch.no_grad():
            for buffer, value in zip(block.buffers(), start, strict=True):
                buffer.copy_(value)
        one, other = fn(x).square().sum(), fn(y).cos().sum()
        found.append([*torch.autograd.grad(one, [x, *block.parameters()]), *torch.autograd.grad(other, [y])])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    assert_replayed(region)


def test_a_norm_that_is_frozen_later_reads_its_statistics() -> None:
    block = Bottleneck()
    region = recollect.checkpoint(block, policy=CONVOLUTIONS)
    for is_frozen in (False, False, True, True, False):
        block.norm1.train(not is_frozen)
        x = image()[0]
        start = [buffer.clone() for buffer in block.buffers()]
        expected = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
        with torch.no_grad():
            for buffer, value in zip(block.buffers(), start, strict=True):
                buffer.copy_(value)
        loss = region(x).square().sum()
        assert all(map(torch.equal, torch.autograd.grad(loss, [x, *block.parameters()]), expected))


def test_meters_count_the_copies_of_what_is_overwritten() -> None:
    """Kept results that the function overwrites are held as copies, which is memory like any other."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(SIZE, SIZE, 3, padding=1), nn.ReLU(inplace=True))]
    block = nn.Sequential(*layers)
    region = recollect.checkpoint(block, policy=CONVOLUTIONS)
    for _ in range(4):
        with LiveBytes() as live:
            (x,) = image()
            result = region(x)
        assert live.live_bytes == 5 * x.nbytes  # the argument, the result, and what three convolutions gave
        result.sum().backward()


def reads_before(x: Tensor, w: Tensor) -> Tensor:
    """Something else needs what is overwritten."""
    h = torch.sin(x @ w)
    other = (h * 2).exp()
    return h.relu_().square() + other


def reads_before_and_after(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    first = torch.cos(h * 1)
    h.mul_(2).add_(first).tanh_()
    return (h.exp() * first).sigmoid()


def overwrites_its_own_sum(x: Tensor, w: Tensor) -> Tensor:
    h = x + w
    h.add_(h.detach().clone().sin_())
    return h.cos().exp()


def through_a_view(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin() * 1
    h.view(-1)[::2].mul_(3)
    return h.exp()


def an_index(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin() * 1
    h[0] = x[1]
    return h.exp()


def drops_out(x: Tensor, w: Tensor) -> Tensor:
    return functional.dropout((x @ w).sin() * 1, 0.5, inplace=True).exp()


def multiplies(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() * 1).mul_(w).exp()


def its_input(x: Tensor, w: Tensor) -> Tensor:
    h = x * 1
    return torch.exp_(h.mul_(w)).sin()


def a_normalised_sum(x: Tensor, w: Tensor) -> Tensor:
    h = functional.silu(x @ w + 1, inplace=True)
    h += x
    return functional.hardtanh(h, inplace=True).sigmoid_() * w


CASES = [
    reads_before,
    reads_before_and_after,
    overwrites_its_own_sum,
    through_a_view,
    an_index,
    drops_out,
    multiplies,
    its_input,
    a_normalised_sum,
]


@pytest.mark.filterwarnings("ignore:policy .* this step")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("kept", ["aten.mm.default", "aten.exp.default", "aten.sin.default"])
@pytest.mark.parametrize("fn", CASES)
def test_gradients_are_the_plain_ones(fn: Callable[..., Tensor], kept: str, twice: bool) -> None:
    def make() -> tuple[Tensor, ...]:
        return tuple(torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2))

    assert_like_plain(fn, policies.save_ops(kept), make, twice=twice)


def test_what_is_overwritten_is_memory_of_its_own_or_the_region_runs_again() -> None:
    """In later calls `contiguous` gives its argument itself, and that is what is overwritten."""

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        return torch.relu_(h.t().contiguous() if x.shape[0] > 1 else h).exp() * h.sum()

    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.exp.default"))
    for is_turned in (False, True, False):
        x = (torch.randn(4, 4).t() if is_turned else torch.randn(4, 4)).requires_grad_()
        expected = torch.autograd.grad(fn(x).sum(), x)
        assert torch.equal(torch.autograd.grad(region(x).sum(), x)[0], expected[0])


def test_a_kept_value_that_is_overwritten_is_kept_as_a_copy() -> None:
    region = recollect.checkpoint(lambda x, w: (x @ w).relu_().exp(), policy=policies.save_ops("aten.mm.default"))
    for _ in range(3):
        x, w = (torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2))
        loss = region(x, w).sum()
        with Operators() as seen:
            loss.backward()
        assert seen.all.count("mm") == 2  # of backward itself
    assert "it writes into tensors in place" in way_of(region)


@pytest.mark.gpu
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_norms_of_an_accelerator_are_replayed(layout: torch.memory_format, is_half: bool) -> None:
    torch.manual_seed(0)
    block = Bottleneck().to("cuda").to(memory_format=layout)  # type: ignore[call-overload]
    region = recollect.checkpoint(block, policy=policies.save_ops("aten.convolution.default"))
    x = torch.randn(16, SIZE, 128, 128, device="cuda").to(memory_format=layout).requires_grad_()
    start = [buffer.clone() for buffer in block.buffers()]
    found = []
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        for fn in (block, region, region, region):
            with torch.no_grad():
                for buffer, value in zip(block.buffers(), start, strict=True):
                    buffer.copy_(value)
            with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
                loss = fn(x).float().square().sum()
            gradients = torch.autograd.grad(loss, [x, *block.parameters()])
            found.append([*gradients, *(buffer.clone() for buffer in block.buffers())])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    assert "recomputed by replaying" in way_of(region) or "too small" in way_of(region)
