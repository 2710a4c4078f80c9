"""A budget decides what a compiled step keeps: it is met, gradients stay, and torch's own knob needs more memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import recollect
from recollect import BudgetError, Decision
from recollect._bench.cases import list_cases
from recollect._bench.rivals import call_selective, call_torch
from recollect._compile.partition import Partition, _judge, _merge_equal_nodes, partitioner
from recollect._core.calls import Phase
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._plan.budget import parse_budget
from recollect._plan.fusing import is_reducing
from recollect._plan.graph_prices import price, price_all
from recollect._plan.graphs import _leave_room, find_keep_set, plan_within
from recollect._plan.keep_set_search import Judge
from recollect._plan.simulate import Simulation
from tests.compile.graphs import Compiled, run_cut, transformer

pytest.importorskip("scipy")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def make(dropout: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return transformer(layers=3, width=32, dropout=dropout), torch.randn(4, 32, 32)


def run_within(budget: int | str, model: nn.Module, x: Tensor) -> Compiled:
    found: list[Partition] = []
    return run_cut(partitioner(budget=budget, report=found.append), model, x, found, decompose=True)


def run_torchs(share: float, model: nn.Module, x: Tensor) -> Compiled:
    found: list[Partition] = []

    def cut(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _merge_equal_nodes(gm)
        with functorch_config.patch(activation_memory_budget=share):
            forward, backward = min_cut_rematerialization_partition(gm, inputs, **options)
        found.append(_judge(gm, forward, options["num_fwd_outputs"], Plan())[1])
        return forward, backward

    return run_cut(cut, model, x, found, decompose=True)


def peak_of(found: Simulation) -> int:
    return found.peak_bytes - found.held_bytes


def seconds_of(one: Partition) -> float:
    calls = one.profile.calls
    return sum(price(calls[number]) for number in one.simulation.recomputed_calls)


@pytest.fixture(scope="module")
def plain() -> Compiled:
    """A step that torch cuts, with dropout: keeps all but what is fused."""
    return run_torchs(1.0, *make(dropout=0.2))


def test_a_budget_is_met_pointwise_values_go_first_and_gradients_stay(plain: Compiled) -> None:
    whole = plain.partition.simulation
    found = [run_within(whole.held_bytes + int(peak_of(whole) * share), *make(dropout=0.2)) for share in (0.95, 0.6)]
    for share, one in zip((0.95, 0.6), found, strict=True):
        assert peak_of(one.partition.simulation) <= peak_of(whole) * share
        assert all(torch.equal(a, b) for a, b in zip(one.gradients, plain.gradients, strict=True))
    few, many = (one.partition for one in found)
    forward = few.profile.calls[: few.profile.forward_count]
    assert few.simulation.recomputed_calls
    # Products of this width take as long as what is pointwise, so that some run again.
    assert few.simulation.recomputed_flops <= 0.25 * sum(call.flops for call in forward)
    assert few.simulation.recomputed_flops < 0.5 * many.simulation.recomputed_flops
    assert seconds_of(few) < seconds_of(many)


def test_the_smallest_peak_is_below_half_of_the_plain_one(plain: Compiled) -> None:
    smallest = run_within("min", *make(dropout=0.2)).partition.simulation
    assert peak_of(smallest) < 0.5 * peak_of(plain.partition.simulation)


def test_what_was_planned_is_what_is_emitted_and_the_smallest_is_smaller_than_any_other() -> None:
    model, x = make()
    whole = run_within("fastest", model, x).partition.simulation
    budgets: list[int | str] = [
        "min",
        *(whole.held_bytes + int(peak_of(whole) * share) for share in (0.9, 0.75, 0.65, 0.6)),
    ]
    found = [run_within(budget, model, x).partition for budget in budgets]
    for budget, one in zip(budgets, found, strict=True):
        room = None if isinstance(budget, str) else _leave_room(one.profile, budget)
        assert one.simulation.peak_bytes <= find_keep_set(one.profile, room).peak_bytes
    peaks, seconds = [one.simulation.peak_bytes for one in found], [seconds_of(one) for one in found]
    assert min(peaks) == peaks[0]
    assert seconds[1:] == sorted(seconds[1:])


class Headed(nn.Module):
    """Ends with logits that are larger than all before them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(32, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 2048)


def test_what_is_there_again_at_the_peak_is_not_made_again() -> None:
    """Logits are in memory when their gradients are made, so that dropping them before lowers no peak."""
    inner, x = make()
    found = run_within("min", Headed(inner), x).partition
    calls = found.profile.calls
    largest = max(range(found.profile.forward_count), key=lambda number: calls[number].flops)
    assert calls[largest].module.endswith("head")
    assert largest not in found.simulation.recomputed_calls
    assert found.simulation.recomputed_calls


class Wrapped(nn.Module):
    """A module that torch's own checkpoint runs."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.call(self.inner, x)
        return found


@pytest.mark.parametrize(
    ("call", "every"),
    [
        pytest.param(call_torch, 1, id="every block"),
        pytest.param(call_torch, 2, id="every second block"),
        pytest.param(call_selective, 1, id="every second product"),
    ],
)
def test_at_the_peak_of_torchs_policies_no_more_is_made_again(call: Callable[..., Any], every: int) -> None:
    blocks = transformer(layers=4, width=32)
    assert isinstance(blocks, nn.Sequential)
    wrapped = (one if number % every else Wrapped(one, call) for number, one in enumerate(blocks))
    seen = run_torchs(1.0, Headed(nn.Sequential(*wrapped)), torch.randn(4, 32, 32)).partition
    priced, _ = price_all(seen.profile)
    theirs = Judge(priced, None)(seen.kept)
    ours = find_keep_set(seen.profile, theirs.peak_bytes)
    assert theirs.recomputed_s
    assert ours.peak_bytes <= theirs.peak_bytes
    assert ours.recomputed_s <= theirs.recomputed_s
    assert find_keep_set(seen.profile, None).peak_bytes <= theirs.peak_bytes


def profile_of(name: str) -> Profile:
    """The joint graph of a model of the benchmarks, at the small size of the CPU."""
    seen: list[Profile] = []

    def note(profile: Profile) -> Plan:
        seen.append(profile)
        return Plan()

    model, inputs, _ = list_cases("cpu", "small")[name].make("cpu")
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partitioner(planner=note),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    (one,) = seen
    return one


@pytest.mark.parametrize("name", ["ResNet", "MoE"])
def test_no_budget_is_answered_with_less_memory_than_the_smallest_peak(name: str) -> None:
    """Budgets near the smallest peak try other values, and came out up to 1% below it."""
    profile = profile_of(name)
    smallest = find_keep_set(profile, None)
    for share in (0.98, 1.0, 1.02):
        found = find_keep_set(profile, int(smallest.peak_bytes * share))
        assert found.peak_bytes * 1.001 >= smallest.peak_bytes
    made = plan_within(parse_budget(smallest.peak_bytes))(profile)
    assert any(choice.decision is Decision.RECOMPUTE for choice in made.choices)
    with pytest.raises(BudgetError) as error:
        plan_within(parse_budget(int(smallest.peak_bytes * 0.95)))(profile)
    assert error.value.smallest_bytes == smallest.peak_bytes


class Prefixed(nn.Module):
    """Begins with something narrow, as models do that make masks first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        small = x[:, :, :1]
        for _ in range(40):
            small = small.cumsum(1) * 0.1
        found: Tensor = self.inner(x + small)
        return found


def test_what_is_narrow_at_the_start_hides_no_narrow_place_between_blocks() -> None:
    inner, x = make()
    model = Prefixed(inner)
    plain, smallest = (run_within(budget, model, x).partition.simulation for budget in ("fastest", "min"))
    assert peak_of(smallest) < 0.6 * peak_of(plain)


def test_in_the_time_of_torchs_knob_the_peak_is_lower() -> None:
    model, x = make()
    theirs = run_torchs(0.1, model, x).partition
    ours = run_within(theirs.simulation.held_bytes + int(peak_of(theirs.simulation) * 0.8), model, x).partition
    assert seconds_of(ours) <= seconds_of(theirs)


def test_what_cannot_fit_is_refused_with_the_smallest_peak() -> None:
    model, x = make()
    with pytest.raises(
        BackendCompilerFailed,
        match=r"no choice of values fits 1.00 KiB: the smallest reachable peak of this graph is .*, and its inputs",
    ) as error:
        run_within("1KiB", model, x)
    assert isinstance(error.value.inner_exception, BudgetError)
    assert error.value.inner_exception.smallest_bytes > 1024


def test_a_budget_that_leaves_kernels_no_room_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model, x = make()
    smallest = run_within("min", model, x).partition.simulation.peak_bytes
    caplog.clear()
    run_within(smallest * 2, model, x)
    assert not caplog.records
    run_within(smallest + 1024, model, x)
    (said,) = (record.getMessage() for record in caplog.records)
    assert re.search(r"partitioner\(budget=.*\): .* stay free in this graph, less than the .* KiB", said)


def test_the_fastest_leaves_all_to_the_compiler() -> None:
    model, x = make()
    assert run_within("fastest", model, x).partition.plan.choices == ()


def test_what_norms_and_softmax_make_of_many_numbers_is_kept_under_any_budget() -> None:
    found = run_within("min", transformer(layers=2, width=128), torch.randn(2, 16, 128)).partition
    again = [found.profile.calls[number] for number in found.simulation.recomputed_calls]
    assert any(not is_reducing(call) for call in again)
    assert not [call.op for call in again if is_reducing(call)]


def test_equal_budgets_share_what_is_compiled_and_others_do_not() -> None:
    one, same, other = (partitioner(budget=budget).uuid() for budget in ("1GiB", "1GiB", "2GiB"))
    assert one == same
    assert one != other
    with pytest.raises(ValueError, match="budget 'much': expected bytes"):
        partitioner(budget="much")


def test_a_planned_model_recomputes_in_its_graph_what_the_plan_says() -> None:
    model, x = make()
    seen = recollect.profile(model, x)
    plan = recollect.plan(seen, budget="min")
    found: list[Partition] = []
    silent = partitioner(Plan(), report=found.append)
    with recollect.apply(model, plan):
        planned = run_cut(silent, model, x, found)
    plain_found: list[Partition] = []
    plain = run_cut(partitioner(Decision.SAVE, report=plain_found.append), model, x, plain_found)
    ours, theirs = planned.partition.simulation, plain.partition.simulation
    assert ours.saved_bytes < 0.6 * theirs.saved_bytes
    assert ours.peak_bytes < theirs.peak_bytes
    paths = {region.path for region in plan.regions}
    again = {planned.partition.profile.calls[number] for number in ours.recomputed_calls}
    assert {call.module.split(".")[0] for call in again if call.module} <= {path.split(".")[0] for path in paths}
    assert all(call.phase is Phase.FORWARD for call in again)


class Hourglass(nn.Module):
    """Skips from the first layers to the last: nowhere does little cross."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.make_layer(width, width) for _ in range(layers))
        self.up = nn.ModuleList(self.make_layer(2 * width, width) for _ in range(layers))

    @staticmethod
    def make_layer(given: int, width: int) -> nn.Module:
        first, second = nn.Conv2d(given, 4 * width, 3, padding=1), nn.Conv2d(4 * width, width, 3, padding=1)
        return nn.Sequential(nn.GroupNorm(2, given), nn.SiLU(), first, nn.GroupNorm(2, 4 * width), nn.SiLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=1))
        return x


def test_skips_do_not_hide_the_narrow_places_of_a_u_net() -> None:
    torch.manual_seed(0)
    model, x = Hourglass(), torch.randn(2, 8, 16, 16)
    plain, smallest = run_within("fastest", model, x), run_within("min", model, x)
    assert peak_of(smallest.partition.simulation) < 0.6 * peak_of(plain.partition.simulation)
    assert all(map(torch.equal, smallest.gradients, plain.gradients))
