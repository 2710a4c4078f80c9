"""Plans of models whose blocks write in place and update running statistics."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._plan.problem import Problem
from recollect._plan.ways import can_be_kept, can_replay
from tests.timing import with_fixed_times

SIZE = 8


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(SIZE, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, SIZE, 3, padding=1, bias=False), nn.BatchNorm2d(SIZE)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        found: Tensor = self.relu(y)
        return found


class Quantized(nn.Module):
    """Reads the statistics that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        self.scale.mul_(0.9).add_(0.1 * y.detach().abs().max())
        return (y * self.scale).exp()


class Viewing(nn.Module):
    """Overwrites a part of what a view sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh() * 1
        y.view(-1)[::2].mul_(2)
        return y.exp()


class Assigning(nn.Module):
    """Assigns to chosen rows, as an Informer's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 8 * SIZE), nn.Linear(8 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).sigmoid().exp()
        chosen = hidden.sum(1).topk(4).indices
        rows = hidden.clone()
        rows[chosen] = hidden[chosen].tanh()
        found: Tensor = x + self.down(rows.tanh())
        return found


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
@pytest.mark.parametrize("is_half", [False, True])
def test_peaks_of_plans_are_exact_where_blocks_write_in_place(share: float, is_half: bool) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Bottleneck() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                found: Tensor = self.blocks(x).float().square().mean()
            return found

    model, x = Net(), torch.randn(4, SIZE, 16, 16)
    seen = with_fixed_times(recollect.profile(model, x))
    held = seen.timeline.held_bytes
    plan = recollect.plan(seen, budget=held + int((seen.peak_bytes - held) * share))
    start = [buffer.clone() for buffer in model.buffers()]
    found = []
    for number in range(4):
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), start, strict=True):
                buffer.copy_(value)
        if number == 1:
            applied = recollect.apply(model, plan)
        loss = model(x)
        found.append([*torch.autograd.grad(loss, list(model.parameters())), *(b.clone() for b in model.buffers())])
    measured = recollect.profile(model, x).peak_bytes
    applied.remove()
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    # A block that is run again keeps its statistics aside meanwhile; that is not predicted.
    is_replayed = all(region.way == "replay" for region in plan.regions)
    aside = 0 if is_replayed else sum(buffer.nbytes for buffer in model.blocks[0].buffers())
    assert plan.peak_bytes <= measured <= plan.peak_bytes + aside


@pytest.mark.parametrize(("block", "shape"), [(Quantized, (4, SIZE)), (Viewing, (4, SIZE)), (Assigning, (8, SIZE))])
def test_what_something_else_sees_is_not_replayed(block: type[nn.Module], shape: tuple[int, ...]) -> None:
    problem = Problem(recollect.profile(nn.Sequential(block(), block()), torch.randn(shape)))
    assert not can_replay(problem, problem.runs_of("0")[0])


def test_what_is_overwritten_is_kept_as_the_last_call_leaves_it() -> None:
    problem = Problem(recollect.profile(nn.Sequential(Bottleneck(), Bottleneck()), torch.randn(2, SIZE, 4, 4)))
    run = problem.runs_of("0")[0]
    assert can_replay(problem, run)
    kept = [problem.calls[number].op for number in range(run.first, run.stop) if can_be_kept(problem, run, number)]
    norm = "aten.native_batch_norm.default"  # of which the statistics of the batch are kept
    conv, relu = "aten.convolution.default", "aten.relu_.default"
    assert kept == [conv, norm, relu, conv, norm, relu]


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_peaks_of_plans_are_exact_where_blocks_assign_to_parts_of_tensors(share: float) -> None:
    model, x = nn.Sequential(*(Assigning() for _ in range(4))), torch.randn(256, SIZE)
    seen = with_fixed_times(recollect.profile(model, x))
    plan = recollect.plan(seen, budget=int(seen.peak_bytes * share))
    with recollect.apply(model, plan):
        assert recollect.profile(model, x).peak_bytes == plan.peak_bytes


class Expanded(nn.Module):
    """Ends in a function in place, which saves a copy of what it overwrites: as the blocks of an EfficientNet."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        wide = 4 * SIZE
        self.up, self.down = nn.Conv2d(SIZE, wide, 1), nn.Conv2d(wide, SIZE, 1)
        self.norm = nn.BatchNorm2d(wide) if has_norm else nn.Identity()
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.act(self.norm(self.up(x))))
        return found


@pytest.mark.parametrize("share", [0.8, 0.7])
@pytest.mark.parametrize("has_norm", [False, True])
def test_peaks_of_plans_are_exact_where_what_is_overwritten_was_copied(share: float, has_norm: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Expanded(has_norm=has_norm) for _ in range(5))), torch.randn(8, SIZE, 64, 64)
    seen = with_fixed_times(recollect.profile(model, x))
    plan = recollect.plan(seen, budget=int(seen.peak_bytes * share))
    assert plan.regions
    with recollect.apply(model, plan):
        measured = recollect.profile(model, x).peak_bytes
    # A block that is run again keeps its statistics aside meanwhile; that is not predicted.
    aside = sum(buffer.nbytes for buffer in model[0].buffers())
    assert plan.peak_bytes <= measured <= plan.peak_bytes + aside


class Biased(nn.Module):
    """Adds what a small net makes of a table of three dimensions, and overwrites inside: a view, as Swin V2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Sequential(nn.Linear(2, 32 * SIZE), nn.ReLU(inplace=True), nn.Linear(32 * SIZE, SIZE))
        self.register_buffer("table", torch.randn(1, 64, 2))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + (x + self.bias(self.table)).tanh().sigmoid()
        return found


@pytest.mark.parametrize("share", [0.8, 0.7])
def test_what_nodes_of_a_block_hold_for_its_views_goes_with_the_rest(share: float) -> None:
    model, x = nn.Sequential(*(Biased() for _ in range(4))), torch.randn(4, 64, SIZE)
    seen = with_fixed_times(recollect.profile(model, x))
    plan = recollect.plan(seen, budget=int(seen.peak_bytes * share))
    with recollect.apply(model, plan):
        assert recollect.profile(model, x).peak_bytes == plan.peak_bytes
