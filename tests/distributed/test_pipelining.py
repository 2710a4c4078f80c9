"""Regions inside the stages of a pipeline, under every schedule of `torch.distributed.pipelining`.

Most tests run a whole schedule in this process: two stages on one rank, between which nothing is sent, in a group of
torch's "fake" backend. The schedules with real processes follow at the end.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, SplitPoint, schedules
from torch.torch_version import TorchVersion

import recollect
from recollect._profile.memory import LiveBytes
from recollect._recompute.group import GraphExecGroup
from recollect.integrations.pipelining import SharedRecomputation, share_recomputation
from tests.distributed.launch import Ranks
from tests.watching import Operators

WIDTH = 8
ROWS = 2  # of one micro-batch
MICRO_BATCHES = 4
CPU = torch.device("cpu")

ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
SEVERAL_STAGES = (
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
SPLIT = SEVERAL_STAGES[2:]
V_SHAPED = SEVERAL_STAGES[3:]  # a rank has the n-th stage from the start and from the end


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone, over which nothing can be sent."""
    store: Any = vars(distributed)["HashStore"]()
    distributed.init_process_group("fake", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Block(nn.Module):
    """A transformer's feed-forward block; knows its recomputations, and what they made, by micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.recomputations: Counter[float] = Counter()
        self.made: list[tuple[float, weakref.ref[torch.UntypedStorage]]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        if recollect.is_recomputing():
            batch = x.sum().item()
            self.recomputations[batch] += 1
            self.made.append((batch, weakref.ref(hidden.untyped_storage())))
        return x + nn.functional.dropout(self.down(hidden), 0.1, self.training)

    @property
    def alive(self) -> set[float]:
        """Micro-batches of which recomputed values are alive."""
        return {batch for batch, storage in self.made if storage() is not None}


class Layers(nn.Module):
    """What one stage runs."""

    def __init__(
        self, seed: int, wrap: Callable[[nn.Module], Callable[..., Any]] | None = None, depth: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self._wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self._wrap is None else self._wrap(layer)(x)
        return x

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]


def plain(seed: int) -> Layers:
    return Layers(seed)


def checkpointed(seed: int) -> Layers:
    return Layers(seed, recollect.checkpoint)


def applied(seed: int) -> Layers:
    layers = Layers(seed)
    recollect.apply(layers, {"layers.*": recollect.Decision.RECOMPUTE})
    return layers


def selective(seed: int) -> Layers:
    layers = Layers(seed)
    wrapped = {
        id(layer): recollect.checkpoint(layer, policy=recollect.policies.save_matmuls) for layer in layers.layers
    }
    layers._wrap = lambda layer: wrapped[id(layer)]
    return layers


def selectively_applied(seed: int) -> Layers:
    layers = Layers(seed)
    recollect.apply(layers, {"layers.*": recollect.policies.save_matmuls})
    return layers


MAKERS: dict[str, Callable[[int], Layers]] = {
    "checkpoint": checkpointed,
    "apply": applied,
    "policy": selective,
    "policy by apply": selectively_applied,
}
each_maker = pytest.mark.parametrize("maker", MAKERS)
each_schedule = pytest.mark.parametrize("name", [*ONE_STAGE, *SEVERAL_STAGES])


class Pipeline:
    """The stages of one rank, and their schedule."""

    def __init__(self, name: str, make: Callable[[int], Layers], *, rank: int = 0, ranks: int = 1) -> None:
        self.count = ranks if name in ONE_STAGE else 2 * ranks
        last = self.count - 1
        indices = [rank] if name in ONE_STAGE else [rank, last - rank] if name in V_SHAPED else [rank, rank + ranks]
        self.modules = {index: make(index) for index in indices}
        self.stages = [self._stage(module, index) for index, module in self.modules.items()]
        self.schedule: Any = getattr(schedules, name)(
            self.stages[0] if name in ONE_STAGE else self.stages, MICRO_BATCHES, loss_fn=nn.MSELoss()
        )
        self.has_first, self.has_last = 0 in indices, last in indices

    def _stage(self, module: Layers, index: int) -> PipelineStage:
        given = torch.zeros(ROWS, WIDTH, requires_grad=index > 0)
        result = torch.zeros(ROWS, WIDTH, requires_grad=True)
        return PipelineStage(module, index, self.count, CPU, input_args=given, output_args=result)

    def step(self, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
        """One step: the losses and the output, where this rank has them."""
        x, target = data(seed)
        losses: list[Tensor] = []
        for module in self.modules.values():
            module.zero_grad()
        args = (x,) if self.has_first else ()
        kwargs = {"target": target, "losses": losses} if self.has_last else {}
        output: Tensor | None = self.schedule.step(*args, **kwargs)
        return [loss.detach() for loss in losses], output

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": parameter.grad
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    @property
    def recomputations(self) -> dict[int, set[int]]:
        """By stage: how often its blocks were recomputed for a micro-batch."""
        found: dict[int, set[int]] = {}
        for index, module in self.modules.items():
            counts = [block.recomputations for block in module.blocks]
            assert all(len(each) >= MICRO_BATCHES for each in counts)
            found[index] = {count for each in counts for count in each.values()}
        return found

    @property
    def blocks(self) -> list[Block]:
        return [block for module in self.modules.values() for block in module.blocks]


def data(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(MICRO_BATCHES * ROWS, WIDTH), torch.randn(MICRO_BATCHES * ROWS, WIDTH)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], count: int) -> None:
    assert len(one) == len(other) == count > 0
    assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())


PARAMETERS = 12  # of a stage


def check_gradients(name: str, maker: str, *, is_shared: bool, rank: int = 0, ranks: int = 1) -> Pipeline:
    """A few steps with regions and without are the same to the bit; gives the pipeline with regions."""
    expected = Pipeline(name, plain, rank=rank, ranks=ranks)
    found = Pipeline(name, MAKERS[maker], rank=rank, ranks=ranks)
    if is_shared:
        share_recomputation(found.schedule)
    for seed in range(2):
        losses, output = expected.step(seed)
        our_losses, our_output = found.step(seed)
        assert len(losses) == (MICRO_BATCHES if found.has_last else 0)
        assert all(map(torch.equal, losses, our_losses))
        if output is not None:
            assert our_output is not None
            assert torch.equal(output, our_output)
        assert_same(found.gradients, expected.gradients, PARAMETERS * len(found.modules))
    return found


# In one process


@each_schedule
@each_maker
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.usefixtures("alone")
def test_gradients_are_those_of_the_schedule_without_regions(name: str, maker: str, is_shared: bool) -> None:
    check_gradients(name, maker, is_shared=is_shared)


@each_schedule
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.usefixtures("alone")
def test_gradients_are_those_of_the_model_without_a_pipeline(name: str, is_shared: bool) -> None:
    def in_eval(seed: int) -> Layers:
        return checkpointed(seed).eval()  # the order of random numbers is another one

    found = Pipeline(name, in_eval)
    if is_shared:
        share_recomputation(found.schedule)
    found.step()
    whole = nn.Sequential(*(plain(index).eval() for index in found.modules))
    x, target = data(0)
    nn.functional.mse_loss(whole(x), target).backward()
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(found.gradients[key], parameter.grad)


@each_schedule
@pytest.mark.parametrize("maker", ["checkpoint", "apply"])
@pytest.mark.usefixtures("alone")
def test_a_micro_batch_is_recomputed_once(name: str, maker: str) -> None:
    found = Pipeline(name, MAKERS[maker])
    share_recomputation(found.schedule)
    found.step()
    assert set().union(*found.recomputations.values()) == {1}


@pytest.mark.usefixtures("alone")
def test_a_split_backward_that_is_not_shared_recomputes_for_each_call_of_autograd() -> None:
    found = Pipeline("ScheduleInterleavedZeroBubble", checkpointed)
    found.step()
    assert found.recomputations == {0: {1}, 1: {4}}  # the input half, then three groups of weights


@pytest.mark.usefixtures("alone")
def test_complaint_35_a_zero_bubble_schedule_recomputes_once_and_frees_what_it_used() -> None:
    found = check_gradients("ScheduleZBVZeroBubble", "checkpoint", is_shared=True)
    assert set().union(*found.recomputations.values()) == {1}
    assert not any(block.alive for block in found.blocks)


# How long values live


class ByHand:
    """The last stage of two, whose micro-batches are run in any order."""

    def __init__(self, make: Callable[[int], Layers] = checkpointed, *, is_shared: bool = True) -> None:
        self.pipeline = Pipeline("ScheduleInterleavedZeroBubble", make)
        self.pipeline.step()  # makes its stages ready
        self.stage = self.pipeline.stages[1]
        self.blocks = self.pipeline.modules[1].blocks
        self.handle = share_recomputation(self.stage) if is_shared else None
        self._losses: dict[int, Tensor] = {}

    def forward(self, *batches: int) -> None:
        for batch in batches:
            self.stage.set_local_fwd_input(torch.randn(ROWS, WIDTH), batch)
            self._losses[batch] = self.stage.forward_one_chunk(batch, ()).square().mean()

    def run_full(self, batch: int) -> None:
        self.stage.backward_one_chunk(batch, loss=self._losses.pop(batch))

    def run_input_half(self, batch: int) -> None:
        self.stage.backward_one_chunk(batch, loss=self._losses.pop(batch), full_backward=False)

    def run_weight_half(self, batch: int) -> None:
        self.stage.backward_weight_one_chunk(batch)

    @property
    def alive(self) -> int:
        """Of how many micro-batches recomputed values are alive; the same in all blocks."""
        (count,) = {len(block.alive) for block in self.blocks}
        return count

    @property
    def recomputations(self) -> list[int]:
        """By micro-batch of this hand, in the order of backward."""
        (first, *others) = [list(block.recomputations.values())[MICRO_BATCHES:] for block in self.blocks]
        assert all(each == first for each in others)
        return first


@pytest.mark.usefixtures("alone")
def test_values_of_a_micro_batch_go_with_its_full_backward() -> None:
    hand = ByHand()
    hand.forward(0, 1, 2)
    for batch in (0, 1, 2):
        hand.run_full(batch)
        assert hand.alive == 0
    assert hand.recomputations == [1, 1, 1]


@pytest.mark.usefixtures("alone")
def test_values_live_from_the_first_half_of_their_micro_batch_to_its_second() -> None:
    hand = ByHand()
    hand.forward(0, 1, 2)
    hand.run_input_half(0)
    assert hand.alive == 1
    hand.run_input_half(1)
    assert hand.alive == 2
    hand.run_full(2)
    assert hand.alive == 2
    hand.run_weight_half(1)
    assert hand.alive == 1
    hand.forward(3)
    hand.run_weight_half(0)
    assert hand.alive == 0
    hand.run_input_half(3)
    hand.run_weight_half(3)
    assert hand.alive == 0
    assert hand.recomputations == [1, 1, 1, 1]


@pytest.mark.usefixtures("alone")
def test_without_sharing_nothing_is_alive_between_the_halves() -> None:
    hand = ByHand(is_shared=False)
    hand.forward(0)
    hand.run_input_half(0)
    assert hand.alive == 0
    hand.run_weight_half(0)
    assert hand.recomputations == [4]


@pytest.mark.usefixtures("alone")
def test_a_step_with_regions_needs_less_memory() -> None:
    peaks = []
    for make in (plain, checkpointed):
        pipeline = Pipeline("ScheduleGPipe", make)
        pipeline.step()  # gradients are there before the second
        with LiveBytes() as live:
            pipeline.step()
        peaks.append(live.peak_bytes)
    assert peaks[1] < 0.75 * peaks[0]


# When the second half does not come


class Broken(Exception):  # noqa: N818
    """Raised in the middle of a step."""


@pytest.mark.usefixtures("alone")
def test_values_go_when_a_weight_half_fails() -> None:
    hand = ByHand()
    hand.forward(0, 1)
    hand.run_input_half(0)
    hand.run_input_half(1)
    stage: Any = hand.stage

    def fail(*_args: Any, **_kwargs: Any) -> None:
        assert hand.alive == 2
        raise Broken

    stage.backward_maybe_with_nosync = fail
    with pytest.raises(Broken):
        hand.run_weight_half(0)
    assert hand.alive == 0
    del stage.backward_maybe_with_nosync
    hand.run_weight_half(1)  # right all the same
    hand.pipeline.step()


@pytest.mark.usefixtures("alone")
def test_values_go_when_another_part_of_the_step_fails() -> None:
    hand = ByHand(is_shared=False)
    share_recomputation(hand.pipeline.schedule)

    def run(*_args: Any, **_kwargs: Any) -> None:
        hand.forward(0)
        hand.run_input_half(0)
        assert hand.alive == 1
        raise Broken

    hand.pipeline.schedule._step_microbatches = run
    with pytest.raises(Broken):
        hand.pipeline.step()
    assert hand.alive == 0


@pytest.mark.usefixtures("alone")
def test_values_go_when_an_input_half_fails() -> None:
    hand = ByHand()
    hand.forward(0, 1)
    hand.run_input_half(0)
    with pytest.raises(Exception, match=r"loss|stage_output|Failed|None"):
        hand.stage.backward_one_chunk(1, loss=None, full_backward=False)
    assert hand.alive == 0


@pytest.mark.usefixtures("alone")
def test_values_go_when_the_next_step_begins() -> None:
    hand = ByHand()
    hand.forward(0)
    hand.run_input_half(0)
    hand.stage.clear_runtime_states()
    assert hand.alive == 0


@pytest.mark.usefixtures("alone")
def test_values_go_when_the_handle_is_removed() -> None:
    hand = ByHand()
    hand.forward(0)
    hand.run_input_half(0)
    assert hand.handle is not None
    hand.handle.remove()
    assert hand.alive == 0
    hand.run_weight_half(0)
    assert all(parameter.grad is not None for parameter in hand.blocks[0].parameters())


class Lone:
    """The least that a stage can be; its graph is held by somebody else."""

    is_first, stage_index = False, 1

    def __init__(self, block: Block, held: list[Any]) -> None:
        self.block, self._held = block, held

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True) -> None:
        del bwd_chunk_id, loss, full_backward
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        y = recollect.checkpoint(self.block)(x)
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        self._held.append(y)

    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None:
        raise AssertionError(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        raise AssertionError


def test_values_go_with_the_stage_even_if_its_graph_stays() -> None:
    block = Block()
    held: list[Any] = []
    stage = Lone(block, held)
    gone = weakref.ref(stage)
    handle = share_recomputation(stage)
    stage.backward_one_chunk(0, full_backward=False)
    assert len(block.alive) == 1
    del stage
    assert gone() is None
    assert not block.alive
    handle.remove()


# Putting it there and taking it away


@pytest.mark.usefixtures("alone")
def test_a_removed_handle_leaves_no_trace() -> None:
    pipeline = Pipeline("ScheduleInterleavedZeroBubble", checkpointed)
    before = [set(vars(each)) for each in (*pipeline.stages, pipeline.schedule)]
    handle = share_recomputation(pipeline.schedule)
    assert isinstance(handle, SharedRecomputation)
    handle.remove()
    handle.remove()
    assert [set(vars(each)) for each in (*pipeline.stages, pipeline.schedule)] == before
    pipeline.step()
    assert pipeline.recomputations == {0: {1}, 1: {4}}
    share_recomputation(pipeline.schedule)


@pytest.mark.usefixtures("alone")
def test_what_others_put_before_a_method_stays() -> None:
    pipeline = Pipeline("ScheduleInterleavedZeroBubble", checkpointed)
    stage: Any = pipeline.stages[1]
    calls: list[str] = []

    def note(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        return noting

    stage.backward_one_chunk = earlier = note("earlier", stage.backward_one_chunk)
    handle = share_recomputation(pipeline.schedule)
    pipeline.step()
    assert calls == ["earlier"] * MICRO_BATCHES
    stage.backward_weight_one_chunk = later = note("later", stage.backward_weight_one_chunk)
    handle.remove()
    calls.clear()
    pipeline.step(seed=1)
    assert calls == ["earlier", "later"] * MICRO_BATCHES
    assert stage.backward_one_chunk is earlier
    assert stage.backward_weight_one_chunk is later
    assert pipeline.recomputations == {0: {1}, 1: {1, 4}}


@pytest.mark.usefixtures("alone")
def test_a_stage_shares_once() -> None:
    pipeline = Pipeline("ScheduleInterleavedZeroBubble", checkpointed)
    share_recomputation(pipeline.stages[1])
    with pytest.raises(ValueError, match="already") as caught:
        share_recomputation(pipeline.schedule)
    assert str(caught.value) == (
        "pipeline stage 1: its two halves of backward already share their recomputation.\n"
        "Call share_recomputation once for a stage, or call remove() on the first handle before."
    )
    assert "step" not in vars(pipeline.schedule)


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(TypeError, match="expects") as caught:
        share_recomputation(nn.Linear(1, 1))
    assert str(caught.value) == (
        "share_recomputation expects a pipeline stage or schedule of torch.distributed.pipelining, not Linear"
    )


@pytest.mark.usefixtures("alone")
def test_inside_a_group_of_the_user_that_one_holds() -> None:
    hand = ByHand()
    with GraphExecGroup():
        hand.forward(0)
        hand.run_input_half(0)
        hand.run_weight_half(0)
    assert hand.recomputations == [1]
    hand.forward(1)
    hand.run_input_half(1)
    with GraphExecGroup():  # only around the second half: two recomputations
        hand.run_weight_half(1)
    assert hand.recomputations == [1, 2]
    assert hand.alive == 0


@pytest.mark.usefixtures("alone")
def test_a_stage_with_its_own_weight_half_is_left_alone() -> None:
    hand = ByHand()
    ran: list[str] = []
    hand.stage.dw_builder = lambda: lambda: ran.append("weights")
    hand.forward(0)
    hand.run_input_half(0)
    assert hand.alive == 0
    hand.run_weight_half(0)
    assert ran == ["weights"]


# The other frontend


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.usefixtures("alone")
def test_stages_of_a_traced_model_share_too() -> None:
    def run(*, has_regions: bool) -> tuple[dict[str, Tensor], int]:
        model = Layers(0).eval()
        pipe = pipelining.pipeline(model, (torch.zeros(ROWS, WIDTH),), split_spec={"layers.1": SplitPoint.BEGINNING})
        stages: list[Any] = [pipe.build_stage(index, CPU) for index in range(2)]
        if has_regions:  # tracing sees operators only, so regions are put into the stages
            for stage in stages:
                recollect.apply(stage.submod, {"layers.*": recollect.Decision.RECOMPUTE})
        schedule: Any = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=nn.MSELoss())
        share_recomputation(schedule)
        x, target = data(0)
        with Operators() as operators:
            schedule.step(x, target=target)
        gradients = {
            name: parameter.grad
            for stage in stages
            for name, parameter in stage.submod.named_parameters()
            if parameter.grad is not None
        }
        return gradients, operators.again.count("gelu")

    expected, none = run(has_regions=False)
    found, again = run(has_regions=True)
    assert_same(found, expected, PARAMETERS)
    assert (none, again) == (0, 2 * MICRO_BATCHES)


# Over two real ranks


# Before, stages that are neighbours on one rank greeted each other through the group, which gloo cannot do.
_needs_2_13 = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="torch needs another backend here")


def over_gloo(*names: str) -> list[Any]:
    return [pytest.param(name, marks=_needs_2_13) if name in V_SHAPED else name for name in names]


def run_on_ranks(name: str, maker: str, is_shared: bool) -> dict[int, set[int]]:
    found = check_gradients(name, maker, is_shared=is_shared, rank=distributed.get_rank(), ranks=2)
    assert not any(block.alive for block in found.blocks)
    return found.recomputations if maker in {"checkpoint", "apply"} else {}


@pytest.mark.parametrize("name", over_gloo(*ONE_STAGE, *SEVERAL_STAGES))
@pytest.mark.parametrize("maker", ["checkpoint", "apply"])
def test_on_two_ranks_a_micro_batch_is_recomputed_once(ranks: Ranks, name: str, maker: str) -> None:
    counts = {index: found for each in ranks.run(run_on_ranks, name, maker, True) for index, found in each.items()}
    assert counts == {index: {1} for index in range(2 if name in ONE_STAGE else 4)}


@pytest.mark.parametrize("name", over_gloo(*SPLIT))
def test_on_two_ranks_what_is_not_shared_is_right_too(ranks: Ranks, name: str) -> None:
    counts = {index: found for each in ranks.run(run_on_ranks, name, "apply", False) for index, found in each.items()}
    assert counts.pop(0) == {1}  # all of it runs in its second half
    assert set().union(*counts.values()) <= {1, 4}
    assert any(4 in found for found in counts.values())


@pytest.mark.parametrize("name", over_gloo("Schedule1F1B", *SPLIT))
@pytest.mark.parametrize("is_shared", [True, False])
def test_on_two_ranks_under_a_policy(ranks: Ranks, name: str, is_shared: bool) -> None:
    ranks.run(run_on_ranks, name, "policy by apply", is_shared)
