"""Plans for real models: within their budget to the byte they predict, with the gradients of the plain step."""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recollect
import recollect._fit.plan as planning
from recollect import BudgetError, Choice, Decision, Plan, Profile
from recollect._core.forecasts import PlannedRegion
from recollect._core.units import format_bytes
from recollect._fit.work import work_for
from recollect._plan.problem import Problem
from recollect._plan.recipes import list_away
from recollect._plan.segments import find_chains, find_last_modules
from recollect._plan.treatments import PlannedWay
from recollect._plan.write import write_choices, write_regions
from recollect._recompute.frame import Frame
from recollect._selective.program import Bound, Program
from recollect._selective.way import SelectiveWay
from tests.models import GPT, MoE, UNet, ViT
from tests.plan.blocks import stacks
from tests.timing import with_fixed_times

pytest.importorskip("scipy")

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "GPT": lambda: (GPT(dropout=0.0), (torch.randint(0, 32, (4, 32)),)),
    "ViT": lambda: (ViT(), (torch.randn(4, 3, 16, 16),)),
    "MoE": lambda: (MoE(), (torch.randn(4, 16, 4),)),
    "U-Net": lambda: (UNet(), (torch.randn(4, 2, 16, 16),)),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, ...], Profile]:
    torch.manual_seed(0)
    model, inputs = MODELS[request.param]()
    for _ in range(2):
        model(*inputs).sum().backward()
    model.zero_grad()
    return model, inputs, take(model, *inputs)


def take(model: nn.Module, *inputs: Tensor) -> Profile:
    """A profile that leads to the same plans everywhere."""
    return with_fixed_times(recollect.profile(model, *inputs))


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    model(*inputs).sum().backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def are_equal(ones: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.parametrize("goal", ["min", 0.8, 0.6])
def test_a_planned_step_has_the_gradients_of_the_plain_one_and_stays_near_its_peak(
    case: tuple[nn.Module, tuple[Tensor, ...], Profile], goal: str | float
) -> None:
    model, inputs, seen = case
    smallest = recollect.plan(seen, budget="min")
    budget = goal if isinstance(goal, str) else max(int(seen.peak_bytes * goal), smallest.peak_bytes * 101 // 100)
    plan = recollect.plan(seen, budget=budget)
    expected = gradients(model, inputs)
    state = {name: value.clone() for name, value in model.state_dict().items() if "num_batches" not in name}
    with recollect.apply(model, plan):
        for _ in range(3):
            found = gradients(model, inputs)
        measured = recollect.profile(model, *inputs).peak_bytes
    assert are_equal(expected, found) or any("running" in name for name in state)
    assert measured <= plan.peak_bytes * 1.15
    assert plan.peak_bytes <= seen.peak_bytes


def test_predicted_peaks_are_exact_where_regions_replay() -> None:
    torch.manual_seed(0)
    model, inputs = MODELS["GPT"]()
    seen = take(model, *inputs)
    for share in (0.9, 0.8, 0.7):
        plan = recollect.plan(seen, budget=int(seen.peak_bytes * share))
        with recollect.apply(model, plan):
            for _ in range(2):
                model(*inputs).sum().backward()
            model.zero_grad()
            assert recollect.profile(model, *inputs).peak_bytes == plan.peak_bytes


def test_where_the_loss_head_takes_most_blocks_forget_what_they_were_given() -> None:
    torch.manual_seed(0)
    model, ids = GPT(dropout=0.0), torch.randint(0, 32, (8, 32))
    model.head = nn.Sequential(nn.Linear(16, 2048), nn.Softplus())  # type: ignore[assignment]
    seen = take(model, ids)
    plan = recollect.plan(seen, budget="min")
    assert [region.joined_to for region in plan.regions if region.path.startswith("layers.")] == [
        "",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    assert plan.forecast is not None
    block_input = ids.numel() * 16 * 4
    assert plan.peak_bytes <= min(point.peak_bytes for point in plan.forecast.policies) - 3 * block_input
    expected = gradients(model, (ids,))
    with recollect.apply(model, Plan.from_json(plan.to_json())):
        assert all(are_equal(gradients(model, (ids,)), expected) for _ in range(3))
        assert recollect.profile(model, ids).peak_bytes == plan.peak_bytes


def test_budgets_are_kept_and_time_never_rises_with_them(case: tuple[nn.Module, tuple[Tensor, ...], Profile]) -> None:
    _, _, seen = case
    floor = recollect.plan(seen, budget="min").peak_bytes
    budgets = [floor * 102 // 100 + (seen.peak_bytes - floor) * step // 8 for step in range(9)]
    plans = [recollect.plan(seen, budget=budget) for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    times = [plan.step_s for plan in plans]
    assert times == sorted(times, reverse=True)
    assert all(plan.lower_bound_s is not None and plan.lower_bound_s <= plan.step_s + 1e-9 for plan in plans)
    assert recollect.plan(seen, budget="fastest").regions == ()


def test_no_plan_is_worse_than_a_standard_policy(case: tuple[nn.Module, tuple[Tensor, ...], Profile]) -> None:
    _, _, seen = case
    forecast = recollect.plan(seen, budget="fastest").forecast
    assert forecast is not None
    assert {"full", "selective", "every:2"} <= {point.name for point in forecast.policies} | {"selective", "every:2"}
    for policy in forecast.policies:
        assert any(p.peak_bytes <= policy.peak_bytes and p.step_s <= policy.step_s for p in forecast.curve)


def test_a_plan_goes_to_json_and_back_and_does_the_same(case: tuple[nn.Module, tuple[Tensor, ...], Profile]) -> None:
    model, _, seen = case
    plan = recollect.plan(seen, budget="min")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert json.loads(plan.to_json())["version"] == 3
    with recollect.apply(model, again) as handle:
        assert {place.name for place in handle.places} == {region.path for region in plan.regions}


def test_what_cannot_fit_is_refused_with_the_smallest_peak_and_what_sets_it() -> None:
    model, inputs = MODELS["GPT"]()
    seen = take(model, *inputs)
    with pytest.raises(
        BudgetError, match=r"no plan fits 1.00 KiB.*: the smallest reachable peak is .* KiB, at "
    ) as error:
        recollect.plan(seen, budget="1KiB")
    assert error.value.smallest_bytes == recollect.plan(seen, budget="min").peak_bytes
    lasting = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert f"optimizer state alone take {format_bytes(lasting)}, and neither a smaller batch" in str(error.value)
    with pytest.raises(BudgetError, match=r"Raise the budget, shrink the batch|The peak is in the loss head"):
        recollect.plan(seen, budget=error.value.smallest_bytes - 1)


def test_the_loss_is_not_blamed_for_a_peak_that_is_in_a_block() -> None:
    """Where a block's backward begins, it reads a gradient that the head has made, which may be next to nothing."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
            )
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            logits: Tensor = self.head(x)
            return logits

    def loss(output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, torch.zeros(512, dtype=torch.long))

    seen = with_fixed_times(recollect.profile(Residual(), torch.randn(512, 32), loss=loss))
    smallest = recollect.plan(seen, budget="min").peak_bytes
    with pytest.raises(BudgetError, match="Raise the budget, shrink the batch, or try the `levers`"):
        recollect.plan(seen, budget=smallest - 1)


def test_a_model_in_place_of_its_profile_is_refused_with_the_call_that_makes_one() -> None:
    with pytest.raises(
        TypeError, match=r"expects a Profile, as recollect.profile\(model, batch\) returns it, not Linear"
    ):
        recollect.plan(nn.Linear(2, 2), budget="1GiB")  # type: ignore[arg-type]


class Flat(nn.Module):
    """Computes everything in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(6, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def test_a_model_without_modules_inside_is_refused_with_that_as_the_reason() -> None:
    seen = recollect.profile(Flat(), torch.randn(64, 16))
    with pytest.raises(recollect.BudgetError, match=r"no modules inside .*: make each of its parts a torch.nn.Module"):
        recollect.plan(seen, budget=seen.peak_bytes // 2)


def test_planning_needs_the_plain_step() -> None:
    model, inputs = MODELS["GPT"]()
    with recollect.apply(model):
        seen = recollect.profile(model, *inputs)
    with pytest.raises(ValueError, match=r"was taken with regions in place .* a plan is made from the plain step"):
        recollect.plan(seen, budget="min")


def test_a_plan_prints_as_a_table_with_what_it_promises() -> None:
    model, inputs = MODELS["GPT"]()
    plan = recollect.plan(take(model, *inputs), budget="min")
    text = str(plan)
    assert "regions" in text
    assert "of the plain step's" in text
    assert "; no plan that only recomputes can beat " in text
    assert "layers.0" in text
    assert "<table>" in plan._repr_html_()


def test_a_plan_on_another_model_is_refused() -> None:
    model, inputs = MODELS["GPT"]()
    plan = recollect.plan(take(model, *inputs), budget="min")
    with pytest.raises(ValueError, match=r"was made for GPT and does not fit UNet, which has no module 'layers.0'"):
        recollect.apply(UNet(), plan)
    with pytest.raises(ValueError, match=r"bytes of parameters in 'layers.0', where the plan saw"):
        recollect.apply(GPT(width=8), plan)


def test_a_plan_without_regions_is_refused_by_apply() -> None:
    plan = Plan(choices=(recollect.Choice(decision=recollect.Decision.SAVE),), name="mine")
    with pytest.raises(ValueError, match="plan 'mine' names no regions: it decides about values, not modules"):
        recollect.apply(GPT(), plan)


def test_options_of_rules_are_refused_beside_a_plan() -> None:
    with pytest.raises(ValueError, match="only works with rules: a plan already names its modules"):
        recollect.apply(GPT(), Plan(), every=2)


def test_planning_leaves_the_model_as_it_was() -> None:
    model, inputs = MODELS["GPT"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    recollect.plan(take(model, *inputs), budget="min")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_diff_names_the_regions_that_are_treated_otherwise() -> None:
    model, inputs = MODELS["GPT"]()
    seen = take(model, *inputs)
    smallest, fastest = (recollect.plan(seen, budget=goal) for goal in ("min", "fastest"))
    assert smallest.diff(smallest) == ""
    assert "layers.0: " in smallest.diff(fastest)
    assert smallest.diff(fastest).splitlines()[0].endswith("-> plain")


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scipy", *(name for name in sys.modules if name.startswith("scipy."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "recollect\[plan\]"'):
        recollect.plan(recollect.profile(torch.nn.Linear(2, 2), torch.ones(1, 2)), budget="min")


def test_whole_modules_go_to_the_host_where_that_is_allowed() -> None:
    with torch.device("meta"):
        model, tokens = GPT(width=1024, layers=4, dropout=0.0), torch.zeros(8, 2048, dtype=torch.long)
    seen = recollect.profile(model, tokens, dry=True, device="H200")
    plan = recollect.plan(seen, budget=seen.peak_bytes * 9 // 10, tiers="host", link_bytes_per_s=1e13)
    sent = [region for region in plan.regions if region.way == "offload"]
    assert sent
    assert all(region.offloaded_bytes for region in sent)
    assert plan.step_s < recollect.plan(seen, budget=seen.peak_bytes * 9 // 10).step_s


def test_where_whole_modules_go_to_the_host_gradients_stay() -> None:
    torch.manual_seed(0)
    model, inputs = GPT(width=64, dropout=0.0), (torch.randint(0, 32, (16, 64)),)
    kind = type(model.layers[0]).__name__
    plan = Plan(regions=(PlannedRegion(path="layers.0", kind=kind, way="offload", tier="host", keeps="all"),))
    expected = gradients(model, inputs)
    with recollect.apply(model, Plan.from_json(plan.to_json())) as handle:
        with pytest.warns(UserWarning, match="values that are already in host memory stay"):  # there is no device here
            gradients(model, inputs)
        found = [gradients(model, inputs) for _ in range(3)]
        assert "offload to host" in str(handle)
    assert all(are_equal(expected, one) for one in found)


def test_the_smallest_plan_is_the_one_that_fits_the_smallest_budget_with_its_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model, tokens = GPT(width=1024, layers=6, dropout=0.0), torch.zeros(8, 2048, dtype=torch.long)
    seen = recollect.profile(model, tokens, dry=True, device="H200")
    alone = recollect.plan(seen, budget="min")
    for margin, sends in ((0.0, True), (0.2, False)):
        monkeypatch.setattr(planning, "find_margin_share", lambda _, *, sends=False, more=margin: more * sends)
        joint = recollect.plan(seen, budget="min", tiers="host", link_bytes_per_s=1e12)
        assert (joint.peak_bytes < alone.peak_bytes) is sends
        assert (joint.regions == alone.regions) is not sends


@settings(max_examples=15, deadline=None)
@given(stacks(layers=3), st.floats(1e4, 1e7), st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_a_plan_that_may_send_is_never_slower_than_one_that_may_not(
    step: Profile, link_bytes_per_s: float, shares: list[int]
) -> None:
    larger = tuple(replace(storage, bytes=storage.bytes * 2**17) for storage in step.storages)
    seen = replace(step, storages=larger)
    floor = recollect.plan(seen, budget="min").peak_bytes
    for share in shares:
        budget = (floor + (seen.peak_bytes - floor) * share // 100) * 101 // 100
        alone = recollect.plan(seen, budget=budget)
        joint = recollect.plan(seen, budget=budget, tiers="disk", link_bytes_per_s=link_bytes_per_s)
        assert joint.step_s <= alone.step_s


@pytest.mark.parametrize("way", ["rerun", "serve", "replay"])
def test_regions_send_their_inputs_or_what_they_keep_to_disk_and_gradients_stay(way: str) -> None:
    torch.manual_seed(0)
    model, inputs = GPT(width=64, dropout=0.0), (torch.randint(0, 32, (16, 64)),)
    regions = tuple(
        PlannedRegion(path=f"layers.{at}", kind=type(layer).__name__, way=way, tier="disk", keeps="addmm")
        for at, layer in enumerate(model.layers)
    )
    products = Choice(decision=Decision.OFFLOAD if way == "replay" else Decision.SAVE, op="aten.addmm.default")
    plan = Plan(regions=regions, choices=(products,) if way != "rerun" else ())
    assert f"{way} from disk" in str(plan)
    expected = gradients(model, inputs)
    with recollect.apply(model, Plan.from_json(plan.to_json())) as handle:
        found = [gradients(model, inputs) for _ in range(3)]
        assert "recompute, keep addmm, offload to disk" in str(handle)
        block = 16 * 64 * 64 * 4  # bytes of a layer's input; products are larger
        report = handle.report()  # what the link is too slow for, or is needed at once, stays
        assert report.out_bytes + report.stayed_bytes >= len(regions) * block * (1 if way == "rerun" else 3)
        assert ("recomputed by replaying" in str(recollect.explain(handle))) is (way == "replay")
    assert all(are_equal(expected, one) for one in found)


@pytest.mark.parametrize("is_cast", [False, True])
def test_replays_send_just_the_values_that_their_plan_says(monkeypatch: pytest.MonkeyPatch, is_cast: bool) -> None:
    torch.manual_seed(0)
    model, inputs = GPT(width=64, layers=2, dropout=0.1), (torch.randint(0, 32, (16, 64)),)
    sent: dict[str, list[int]] = {}

    def note(self: SelectiveWay, frame: Frame, program: Program, bound: Bound) -> None:
        sizes = [bound.held[number].untyped_storage().nbytes() for number in program.sent]
        sent.setdefault(frame.name, sizes)
        replay(self, frame, program, bound)

    replay = SelectiveWay._replay
    monkeypatch.setattr(SelectiveWay, "_replay", note)

    def step(model: nn.Module, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            loss: Tensor = model(*inputs).float().square().mean()
        return loss

    def train() -> list[Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad()
        step(model, *inputs).backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    seen = with_fixed_times(recollect.profile(step, model, *inputs))
    work = work_for(seen, 2e10)
    expected = train()
    points = [point for point in work.frontier().candidates if any(option.sent for _, option in point.choice)]
    assert points
    for point in points[:: max(1, len(points) // 3)]:
        regions = tuple(write_regions(work.problem, point.choice, "disk"))
        plan = Plan(regions=regions, choices=tuple(write_choices(work.problem, point.choice)))
        sent.clear()
        with recollect.apply(model, Plan.from_json(plan.to_json())):
            found = [train() for _ in range(3)]
        assert all(are_equal(expected, one) for one in found)
        planned = {region.path: region.offloaded_bytes for region in regions if region.way == "replay"}
        assert {path: sum(sizes) for path, sizes in sent.items()} == planned


def test_single_values_that_replays_send_beat_whole_modules_at_small_budgets() -> None:
    with torch.device("meta"):
        model, tokens = GPT(width=1024, layers=8, dropout=0.0), torch.zeros(8, 2048, dtype=torch.long)
    frontier = work_for(recollect.profile(model, tokens, dry=True, device="H200"), 5e10).frontier()
    sends = [any(option.sent for _, option in point.choice) for point in frontier.points]
    assert any(sends)
    best = frontier.points[sends.index(True)]
    whole = [
        point.step_s
        for point in frontier.candidates
        if point.peak_bytes <= best.peak_bytes and not any(option.sent for _, option in point.choice)
    ]
    assert all(best.step_s < one for one in whole)


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_what_is_sent_beside_recomputation_makes_plans_quicker(share: float) -> None:
    model, inputs = GPT(width=64, dropout=0.0), (torch.randint(0, 32, (16, 64)),)
    seen = recollect.profile(model, *inputs, dry=True, device="H200")
    floor = recollect.plan(seen, budget="min").peak_bytes
    budget = int((floor + (seen.peak_bytes - floor) * share) * 1.04)
    alone, joint = (recollect.plan(seen, budget=budget, tiers=tiers, link_bytes_per_s=None) for tiers in (None, "host"))
    assert joint.step_s <= alone.step_s
    assert joint.peak_bytes <= budget


def test_with_a_link_candidates_mark_the_begin_of_backward_and_send_evenly() -> None:
    model, inputs = GPT(width=64, dropout=0.0), (torch.randint(0, 32, (16, 64)),)
    seen = recollect.profile(model, *inputs, dry=True, device="H200")
    problem = work_for(seen, 1e12).problem
    chain = find_chains(problem)[0]
    assert [segment.path for segment in find_last_modules(problem, chain)][:2] == ["head", "norm"]
    blocks = [f"layers.{number}" for number in range(4)]
    for choice in list_away(problem, chain):
        assert [segment.path for segment, _ in choice] == blocks
        assert all(option.sends for _, option in choice)
    sent = [
        {segment.path for segment, option in point.choice if option.way is PlannedWay.OFFLOAD}
        for point in work_for(seen, 1e12).frontier().candidates
    ]
    assert any({"head", "layers.0"} <= paths for paths in sent)
    assert any("head" not in paths and "layers.0" in paths for paths in sent)
    assert not list(list_away(work_for(seen, None).problem, chain))


class Borrowing(nn.Module):
    """Calls a part of its first block once more in the end, as diffusers' DiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        y = x
        for layer in self.layers:
            y = layer(y)
        loss: Tensor = (y * first[0](x)).sum()
        return loss


def test_a_part_of_a_block_that_others_call_is_no_run_of_the_block() -> None:
    torch.manual_seed(0)
    model, x = Borrowing(), torch.randn(512, 64)
    seen = with_fixed_times(recollect.profile(model, x))
    problem = work_for(seen, None).problem
    assert [len(problem.runs_of(path)) for path in ("layers.0", "layers.0.0", "layers.1")] == [1, 2, 1]
    shares = [point.peak_bytes / seen.peak_bytes for point in work_for(seen, None).frontier().points]
    assert all(high - low < 0.1 for high, low in itertools.pairwise(shares))
    plan = recollect.plan(seen, budget=seen.peak_bytes * 7 // 10)
    expected = gradients(model, (x,))
    with recollect.apply(model, plan):
        found = gradients(model, (x,))
        measured = recollect.profile(model, x).peak_bytes
    assert are_equal(expected, found)
    assert measured == plan.peak_bytes


def test_a_planned_model_compiles_as_one_graph_with_the_same_gradients() -> None:
    model, inputs = MODELS["GPT"]()
    seen = take(model, *inputs)
    expected = gradients(model, inputs)
    with recollect.apply(model, recollect.plan(seen, budget=seen.peak_bytes * 3 // 4)):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(*inputs).sum().backward()
    found = [None if p.grad is None else p.grad for p in model.parameters()]
    assert are_equal(expected, found)
    torch.compiler.reset()


def test_other_tiers_and_speeds_are_refused() -> None:
    model, inputs = MODELS["GPT"]()
    seen = take(model, *inputs)
    with pytest.raises(
        ValueError, match=r"tiers='tape': expected 'host', 'disk', \('host', 'disk'\), or None to offload"
    ):
        recollect.plan(seen, budget="min", tiers="tape")
    with pytest.raises(ValueError, match="the step already runs in host memory"):
        recollect.plan(seen, budget="min", tiers="host")
    dry = recollect.profile(model, *inputs, dry=True, device="H200")
    with pytest.raises(ValueError, match="link_bytes_per_s=0: expected a number above 0"):
        recollect.plan(dry, budget="min", tiers="host", link_bytes_per_s=0)


class Biased(nn.Module):
    """Attention with a bias that is learned: it has no kernel, and copies views of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.zeros(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.expand(x.shape[0], 2, 16, 16))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + out


def test_a_copy_of_a_view_that_a_call_makes_is_not_made_again_without_the_call() -> None:
    problem = Problem(take(Biased(), torch.randn(8, 16, 32)))
    copies = [at for at in range(problem.forward_count) if problem.calls[at].op == "aten.clone.default"]
    inside = [at for at in copies if "safe_softmax" in "".join(_ops_beside(problem, at))]
    assert inside
    assert problem.inner_casts.isdisjoint(inside)


def _ops_beside(problem: Problem, number: int) -> list[str]:
    """The calls that the same call of torch makes."""
    within = problem.calls[number].within
    return [call.op for call in problem.calls[: problem.forward_count] if call.within == within]


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_predicted_peaks_are_exact_where_attention_copies_views(share: float) -> None:
    model, inputs = nn.Sequential(*(Biased() for _ in range(4))), (torch.randn(8, 16, 32),)
    seen = take(model, *inputs)
    plan = recollect.plan(seen, budget=max(int(seen.peak_bytes * share), recollect.plan(seen, budget="min").peak_bytes))
    expected = gradients(model, inputs)
    with recollect.apply(model, plan):
        found = [gradients(model, inputs) for _ in range(3)]
        measured = recollect.profile(model, *inputs).peak_bytes
    assert measured == plan.peak_bytes
    assert all(are_equal(expected, one) for one in found)


class Casting(nn.Module):
    """Runs its blocks under autocast: what a linear layer saves is then made inside of its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(width=32, dropout=0.0)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = self.model(ids)
        return found


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_predicted_peaks_are_exact_under_autocast(share: float) -> None:
    torch.manual_seed(0)
    model, inputs = Casting(), (torch.randint(0, 32, (8, 32)),)
    seen = take(model, *inputs)
    plan = recollect.plan(seen, budget=max(int(seen.peak_bytes * share), recollect.plan(seen, budget="min").peak_bytes))
    expected = gradients(model, inputs)
    with recollect.apply(model, plan):
        found = [gradients(model, inputs) for _ in range(3)]
        measured = recollect.profile(model, *inputs).peak_bytes
    assert plan.peak_bytes - 64 <= measured <= plan.peak_bytes  # a bias that is cast again is gone a call earlier
    assert all(are_equal(expected, one) for one in found)


def test_where_tokens_are_routed_blocks_are_replayed_from_what_was_chosen() -> None:
    torch.manual_seed(0)
    model, inputs = MODELS["MoE"]()
    seen = take(model, *inputs)
    chosen = [call.op for call in seen.calls if call.is_routing]
    assert chosen[0].startswith("aten.topk")
    plan = recollect.plan(seen, budget=max(int(seen.peak_bytes * 0.8), recollect.plan(seen, budget="min").peak_bytes))
    with recollect.apply(model, plan):
        for _ in range(3):
            gradients(model, inputs)
        assert recollect.profile(model, *inputs).peak_bytes <= plan.peak_bytes * 1.01


def test_a_plan_that_no_longer_fits_is_made_anew_for_what_it_was_asked_for() -> None:
    model, inputs = MODELS["GPT"]()
    seen = take(model, *inputs)
    plan = recollect.plan(seen, budget=seen.peak_bytes * 8 // 10)
    narrower = GPT(width=8, dropout=0.0)
    with pytest.raises(ValueError, match=r"within the same budget: recollect.plan\(.*, budget=plan\)"):
        recollect.apply(narrower, plan)
    again = recollect.plan(take(narrower, *inputs), budget=plan)
    assert plan.forecast is not None
    assert again.forecast is not None
    assert again.forecast.budget_bytes == plan.forecast.budget_bytes == seen.peak_bytes * 8 // 10
    recollect.apply(narrower, again).remove()
    smallest = recollect.plan(take(model, *inputs), budget="min")
    assert recollect.plan(take(narrower, *inputs), budget=smallest).forecast.budget == "min"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="plan 'mine' was written by hand and has no budget"):
        recollect.plan(take(model, *inputs), budget=Plan(name="mine"))


class Checkpointed(nn.Module):
    """Recomputes on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_step_that_checkpoints_itself_is_refused_with_the_switches_that_turn_that_off() -> None:
    said = r"already recomputes \(from aten.* in layers.* not through recollect.*\n.*gradient_checkpointing_disable\(\)"
    with pytest.raises(ValueError, match=said):
        recollect.fit(Checkpointed(), torch.ones(4, 8), budget="min")


class Dropping(nn.Module):
    """Leaves layers out, as training with layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.left_out = {1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.left_out:
                x = x + layer(x)
        return x


def test_layers_that_did_not_run_are_planned_like_those_beside_them() -> None:
    model, x = Dropping(), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    plan = recollect.plan(take(model, x), budget="min")
    ways = {region.path: (region.way, region.keeps) for region in plan.regions}
    assert ways["layers.1"] == ways["layers.0"]
    kept = {number: sum(choice.region == f"layers.{number}" for choice in plan.choices) for number in (0, 1)}
    assert kept[0] == kept[1]
    [note] = [note for note in plan.notes if "did not run" in note]
    assert note.startswith("layers.1 did not run in the profiled step: planned like layers.0.")
    model.left_out.clear()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with recollect.apply(model, plan):
        found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        under = recollect.profile(model, x).peak_bytes
    assert all(map(torch.equal, found, expected))
    assert under < recollect.profile(model, x).peak_bytes


def test_with_all_layers_at_work_nothing_is_said_of_idle_ones() -> None:
    model = Dropping()
    model.left_out.clear()
    plan = recollect.plan(take(model, torch.ones(64, 32)), budget="min")
    assert plan.regions
    assert not any("did not run" in note for note in plan.notes)


def test_a_step_that_computes_something_before_its_model_has_a_lower_bound() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))

    def step(x: Tensor) -> None:
        model(torch.sin(x)).square().mean().backward()

    seen = with_fixed_times(recollect.profile(step, torch.randn(64, 16)))
    assert recollect.plan(seen, budget="min").lower_bound_s is not None
