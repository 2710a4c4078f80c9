"""What `recollect plan --world` says of a sharded step is what a step that FSDP2 shards takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import recollect
from recollect._plan.sharding import shard
from recollect._profile.memory import LiveBytes
from tests.distributed.launch import Ranks

WIDTH, DEPTH, VOCAB = 128, 4, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).logsumexp(-1).mean()
        return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(rows: int) -> tuple[int, int]:
    """The estimated peak and the real one."""
    ids = torch.randint(0, VOCAB, (rows, 16))
    whole = Net()
    optimizer = torch.optim.AdamW(whole.parameters())
    train(whole, optimizer, ids)
    estimated = shard(recollect.profile(train, whole, optimizer, ids), 2).peak_bytes
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        train(model, optimizer, ids)
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    with LiveBytes(include=[model, ids, *state]) as meter:
        train(model, optimizer, ids)
    return estimated, meter.peak_bytes


@pytest.mark.parametrize(("rows", "above"), [(4, 1.35), (64, 1.05)])
def test_the_estimate_is_never_below_what_fsdp2_takes_and_near_it(ranks: Ranks, rows: int, above: float) -> None:
    for estimated, measured in ranks.run(compare, rows):
        assert measured * 0.99 <= estimated <= measured * above
