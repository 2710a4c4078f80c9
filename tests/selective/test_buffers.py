"""Buffers that a region's modules update, where some of what updates or reads them is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import policies
from recollect._policy.base import PolicyLike
from tests.selective.comparing import SIZE, assert_like_plain, square, squares
from tests.watching import backward

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")


class Follower(nn.Module):
    """Reads a running mean and then updates it."""

    mean: Tensor

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        self._in_place = in_place
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        out = x * (1 + self.mean)
        if self._in_place:
            self.mean.mul_(0.5).add_(x.detach().mean(0).tanh())
        else:
            self.mean = self.mean * 0.5 + x.detach().mean(0).tanh()
        return out.sin()


class TwiceFollowed(nn.Module):
    """Calls its follower in a named block, and then once more as `way` says."""

    def __init__(self, way: str, *, in_place: bool = True) -> None:
        super().__init__()
        self.follower, self.linear = Follower(in_place=in_place), nn.Linear(SIZE, SIZE)
        self._way = way

    def forward(self, x: Tensor) -> Any:
        x = recollect.region("followed")(self.follower)(x)
        match self._way:
            case "again":
                x = self.follower(x)
            case "in a region":
                x = recollect.checkpoint(self.follower)(x)
            case "in a region with a policy":
                x = recollect.checkpoint(self.follower, policy=policies.save_all)(x)
            case "by an operator":
                x = self.linear(x) * (1 + self.follower.mean)
        return self.linear(x).tanh() * x


POLICIES: dict[str, PolicyLike] = {
    "block": policies.save_names("followed"),
    "block and products": policies.first_match(policies.save_names("followed"), policies.save_matmuls),
    "module": policies.save_modules("follower"),
    "module and products": policies.first_match(policies.save_modules("follower"), policies.save_matmuls),
    "all": policies.save_all,
    "products": policies.save_matmuls,
}
WAYS = ["again", "in a region", "in a region with a policy", "by an operator"]


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_a_kept_block_updates_is_read_afterwards(policy: PolicyLike, way: str, in_place: bool, check: str) -> None:
    module = TwiceFollowed(way, in_place=in_place)
    assert_like_plain(module, policy, squares(1), twice=True, check=check)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_each_of_two_forwards_reads_its_own(policy: PolicyLike, way: str) -> None:
    found = []
    for has_region in (False, True):
        torch.manual_seed(0)
        module: nn.Module = TwiceFollowed(way)
        region: Callable[..., Any] = recollect.checkpoint(module, policy=policy) if has_region else module
        for _ in range(3):
            x = square()
            backward(region(x).sum() + region(x * 2).sum())
            found.append(x.grad)
    for one, other in zip(found[:3], found[3:], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(SIZE),
        lambda: nn.InstanceNorm1d(SIZE, affine=True, track_running_stats=True),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    ],
    ids=["batch norm", "instance norm", "spectral norm"],
)
@pytest.mark.parametrize("policy", ["block", "block and products", "all", "products"])
def test_running_statistics(policy: str, make: Callable[[], nn.Module], check: str) -> None:
    """Kept values are written into by batch norm's kernels, without a word in their schema."""
    norm = make()

    def fn(x: Tensor) -> Any:
        x = recollect.region("followed")(norm)(x[None].float())[0]
        return norm(x[None].sin())[0].exp()

    assert_like_plain(fn, POLICIES[policy], squares(1), module=norm, twice=True, check=check)
