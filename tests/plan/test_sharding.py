"""A step as one of many devices runs it under FSDP2: what is divided, and which buffers come on top."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.calls import Category, Phase
from recollect._core.profiles import Profile
from recollect._plan.sharding import shard

WORLD = 8
BLOCK, ROOT = 2 * 64 * 256 * 4, 2 * 100 * 64 * 4  # bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).logsumexp(-1).mean()
        return loss


@pytest.fixture(scope="module")
def seen() -> Profile:
    ids = torch.randint(0, 100, (4, 16))
    return recollect.profile(Model(), ids, optimizer=torch.optim.AdamW, dry=True, device="H100")


def bytes_before(profile: Profile) -> Counter[Category]:
    return Counter(profile.timeline.bytes_by_category(-1))


def test_one_device_has_the_step_as_it_is(seen: Profile) -> None:
    assert shard(seen, 1) is seen


def test_a_world_of_none_is_refused(seen: Profile) -> None:
    with pytest.raises(ValueError, match="world=0: expected at least 1 device"):
        shard(seen, 0)


def test_state_is_divided_among_the_devices(seen: Profile) -> None:
    whole, shared = bytes_before(seen), bytes_before(shard(seen, WORLD))
    for category in (Category.PARAMETER, Category.OPTIMIZER):
        assert whole[category] / WORLD <= shared[category] < whole[category] / WORLD * 1.25  # each rounds up to 512


def test_gradients_that_stay_are_shards_and_whole_only_until_their_unit_is_done(seen: Profile) -> None:
    shared = shard(seen, WORLD)
    last = len(seen.calls) - 1
    whole = seen.timeline.bytes_by_category(last)[Category.GRADIENT]
    assert shared.timeline.bytes_by_category(last)[Category.GRADIENT] < whole / WORLD * 1.25


def test_at_most_three_buffers_of_a_block_and_the_root_are_there_in_forward(seen: Profile) -> None:
    shared = shard(seen, WORLD)
    held = bytes_before(shared)[Category.PARAMETER]
    most = max(
        shared.timeline.bytes_by_category(at)[Category.PARAMETER]
        for at, call in enumerate(seen.calls)
        if call.phase is Phase.FORWARD and "layers" in call.module
    )
    assert most == held + ROOT + 3 * BLOCK


def test_the_last_block_of_forward_has_none_gathered_behind_it(seen: Profile) -> None:
    shared = shard(seen, WORLD)
    last = max(at for at, call in enumerate(seen.calls) if call.phase is Phase.FORWARD and "layers.3" in call.module)
    assert shared.timeline.bytes_by_category(last)[Category.PARAMETER] == (
        bytes_before(shared)[Category.PARAMETER] + ROOT + BLOCK
    )


def test_activations_and_times_are_as_they_were(seen: Profile) -> None:
    shared = shard(seen, WORLD)
    assert shared.step_s == seen.step_s
    for at in range(seen.forward_count):
        mine, theirs = (one.timeline.bytes_by_category(at).get(Category.ACTIVATION, 0) for one in (seen, shared))
        assert mine == theirs


def test_what_the_optimizer_makes_is_divided_too(seen: Profile) -> None:
    step = next(at for at, call in enumerate(seen.calls) if call.op.startswith("aten._foreach_sqrt"))
    shared = shard(seen, WORLD)
    whole, part = (one.timeline.bytes_by_category(step)[Category.TEMPORARY] for one in (seen, shared))
    assert part < whole / WORLD * 1.25


def test_a_plan_of_a_sharded_step_counts_its_buffers(seen: Profile) -> None:
    pytest.importorskip("scipy")
    shared = shard(seen, WORLD)
    made = recollect.plan(shared, budget="min")
    assert made.peak_bytes <= shared.peak_bytes < seen.peak_bytes
    assert any("8 devices that share parameters" in note for note in made.notes)


def test_a_model_without_repeated_blocks_is_gathered_whole() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    seen = recollect.profile(model, torch.randn(4, 64), dry=True, device="H100")
    shared = shard(seen, 2)
    assert max(shared.timeline.bytes_by_category(at)[Category.PARAMETER] for at in range(len(seen.calls))) >= (
        64 * 64 * 4 * 2
    )
